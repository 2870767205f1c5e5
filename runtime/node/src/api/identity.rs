//! Who asks, and which conversation it is: names go in, keyed hashes come out.

use super::error::ApiError;
use axum::http::{HeaderMap, header};
use blake3::Hasher;
use starling_core::ids::{ConversationKey, RankId};
use starling_core::round::Explicit;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Headers that name a conversation, first one wins. Request ids are not among them: they change with each turn.
pub const CONVERSATION_HEADERS: [&str; 5] =
    ["x-starling-conversation", "x-session-id", "x-correlation-id", "x-session-affinity", "x-claude-code-session-id"];
/// Tenant of every request while no key is configured.
const OPEN_TENANT: u64 = 0;
/// Longest request id that is taken over from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Knows the bearer keys by their hashes, and hashes names so that all nodes of a cluster agree.
pub struct Identities {
    /// Hashes, so that comparing takes the same time whatever the key.
    keys: Vec<blake3::Hash>,
    secret: [u8; 32],
}

impl Identities {
    pub fn new(cluster: &str, keys: &[String]) -> Self {
        let secret = blake3::derive_key("starling 2026 tenant and conversation keys", cluster.as_bytes());
        let keys = keys.iter().map(|key| blake3::keyed_hash(&secret, key.as_bytes())).collect();
        Self { keys, secret }
    }

    /// The tenant: whose blocks a request may share.
    ///
    /// # Errors
    /// When keys are configured and the request does not have one of them.
    pub fn tenant(&self, headers: &HeaderMap) -> Result<u64, ApiError> {
        if self.keys.is_empty() {
            return Ok(OPEN_TENANT);
        }
        let key = bearer(headers).ok_or(ApiError::NoKey)?;
        let hash = blake3::keyed_hash(&self.secret, key);
        let known = self.keys.iter().fold(false, |known, key| known | (*key == hash));
        match known {
            true => Ok(u64::from_le_bytes(first(hash.as_bytes())).max(OPEN_TENANT + 1)),
            false => Err(ApiError::WrongKey),
        }
    }

    /// The conversation a request belongs to, if the client names one in a header or as `prompt_cache_key`.
    pub fn conversation(&self, tenant: u64, headers: &HeaderMap, cache_key: Option<&str>) -> Option<ConversationKey> {
        let named = CONVERSATION_HEADERS.iter().filter_map(|name| headers.get(*name)).map(|value| value.as_bytes());
        let name = named.chain(cache_key.map(str::as_bytes)).find(|name| !name.is_empty())?;
        Some(self.named(tenant, name))
    }

    /// The conversation that a tenant calls by this name.
    pub fn named(&self, tenant: u64, name: &[u8]) -> ConversationKey {
        let mut hasher = Hasher::new_keyed(&self.secret);
        for part in [&tenant.to_le_bytes(), name] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        ConversationKey(u128::from_le_bytes(first(hasher.finalize().as_bytes())))
    }
}

/// The first bytes of a hash.
fn first<const N: usize>(hash: &[u8; 32]) -> [u8; N] {
    std::array::from_fn(|at| hash[at])
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then(|| key.trim_ascii())
}

/// The rank that a request names, preferred unless the client insists on it.
pub const HEADER_RANK_WANTED: &str = "x-starling-rank";
/// `true`: wait for the named rank rather than run elsewhere.
pub const HEADER_RANK_STRICT: &str = "x-starling-rank-strict";

/// The rank that the client asks for.
///
/// # Errors
/// A header that is not a number, or not `true` or `false`, or strictness about no rank.
pub fn explicit(headers: &HeaderMap) -> Result<Option<Explicit>, ApiError> {
    let text = |name: &str| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let bad = |name: &str, why: String| ApiError::BadField { param: name.to_owned(), why };
    let strict = match text(HEADER_RANK_STRICT).as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => return Err(bad(HEADER_RANK_STRICT, format!("{other:?} is neither true nor false"))),
    };
    match text(HEADER_RANK_WANTED) {
        None if strict => Err(bad(HEADER_RANK_STRICT, format!("{HEADER_RANK_WANTED} names no rank"))),
        None => Ok(None),
        Some(value) => match value.parse() {
            Ok(rank) => Ok(Some(Explicit { rank: RankId(rank), relax: Some(!strict) })),
            Err(_) => Err(bad(HEADER_RANK_WANTED, format!("{value:?} is not a rank's number"))),
        },
    }
}

/// The client's request id, if it is one that may be repeated in headers and logs.
pub fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get("x-request-id")?.to_str().ok()?;
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&byte);
    (!id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX && id.bytes().all(sane)).then(|| id.to_owned())
}

/// Makes names and seeds that do not repeat.
pub struct Mint {
    secret: [u8; 32],
    made: AtomicU64,
}

impl Mint {
    pub fn new() -> Self {
        // The standard library's only source of randomness: the keys of its hash maps.
        let words = [(); 4].map(|()| RandomState::new().hash_one(std::process::id()));
        let mut hasher = Hasher::new();
        for word in words {
            hasher.update(&word.to_le_bytes());
        }
        Self { secret: *hasher.finalize().as_bytes(), made: AtomicU64::new(0) }
    }

    pub fn number(&self) -> u128 {
        let count = self.made.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.secret, &count.to_le_bytes());
        u128::from_le_bytes(first(hash.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_rank_is_named_by_number_and_insisted_on_only_when_asked() {
        let of = |pairs| explicit(&headers(pairs)).map_err(|e| e.to_string());
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&[("x-starling-rank", "3")]), Ok(Some(Explicit { rank: RankId(3), relax: Some(true) })));
        let strict = Explicit { rank: RankId(0), relax: Some(false) };
        assert_eq!(of(&[("x-starling-rank", "0"), ("x-starling-rank-strict", "true")]), Ok(Some(strict)));
        for (pairs, text) in [
            (&[("x-starling-rank", "-1")][..], "x-starling-rank: \"-1\" is not a rank's number"),
            (&[("x-starling-rank", "99999999999")], "x-starling-rank: \"99999999999\" is not a rank's number"),
            (&[("x-starling-rank-strict", "yes")], "x-starling-rank-strict: \"yes\" is neither true nor false"),
            (&[("x-starling-rank-strict", "true")], "x-starling-rank-strict: x-starling-rank names no rank"),
        ] {
            assert_eq!(of(pairs), Err(text.to_owned()));
        }
    }

    #[test]
    fn the_first_named_conversation_wins_and_request_ids_name_none() {
        let of = Identities::new("a", &[]);
        let named = |pairs, cache_key| of.conversation(1, &headers(pairs), cache_key);
        assert_eq!(named(&[("x-request-id", "r")], None), None);
        let session = named(&[("x-session-id", "s")], None).unwrap();
        for name in CONVERSATION_HEADERS {
            let key = of.conversation(1, &headers(&[(name, "s")]), Some("other"));
            assert_eq!(key, Some(session), "{name}");
        }
        assert_eq!(named(&[("x-request-id", "r")], Some("s")), Some(session));
        assert_eq!(named(&[("x-session-id", "")], Some("s")), Some(session));
        assert_ne!(named(&[("x-session-id", "s"), ("x-starling-conversation", "t")], None), Some(session));
    }

    #[test]
    fn keys_depend_on_tenant_and_cluster() {
        let key = |cluster, tenant| Identities::new(cluster, &[]).conversation(tenant, &HeaderMap::new(), Some("s"));
        assert_eq!(key("a", 1), key("a", 1));
        assert_ne!(key("a", 1), key("a", 2));
        assert_ne!(key("a", 1), key("b", 1));
    }

    #[test]
    fn tenants_are_told_apart_by_their_keys() {
        let of = Identities::new("a", &["one".into(), "two".into()]);
        let tenant = |value: &str| of.tenant(&headers(&[("authorization", value)])).ok();
        assert_eq!(tenant("Bearer one"), tenant("bearer one "));
        assert_ne!(tenant("Bearer one"), tenant("Bearer two"));
        for wrong in ["Bearer three", "Bearer ", "one", "Basic one", ""] {
            assert_eq!(tenant(wrong), None, "{wrong:?}");
        }
        assert!(matches!(of.tenant(&HeaderMap::new()), Err(ApiError::NoKey)));
        assert_eq!(Identities::new("a", &[]).tenant(&HeaderMap::new()).unwrap(), OPEN_TENANT);
    }

    #[test]
    fn request_ids_are_taken_only_if_they_can_be_repeated_safely() {
        let id = |value: &str| request_id(&headers(&[("x-request-id", value)]));
        assert_eq!(id("a-1_b.c:d/e+f=g@h").as_deref(), Some("a-1_b.c:d/e+f=g@h"));
        for wrong in ["", "a b", "a\"b", "a<b"] {
            assert_eq!(id(wrong), None, "{wrong:?}");
        }
        assert_eq!(id(&"a".repeat(129)), None);
    }

    #[test]
    fn minted_numbers_do_not_repeat() {
        let mint = Mint::new();
        let numbers: std::collections::BTreeSet<u128> = (0..1_000).map(|_| mint.number()).collect();
        assert_eq!(numbers.len(), 1_000);
    }
}
