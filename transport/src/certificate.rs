//! Who a node is: certificates whose URI name says `spiffe://CLUSTER/node/NAME`, and an authority for development.
//!
//! Every node has a certificate of the cluster's authority, and both sides of a connection check the other's. The same name is
//! there as a DNS name, so that a dialer's TLS layer itself refuses whoever is not the one that was dialed.

use crate::link::{NodeName, is_label};
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rcgen::{KeyUsagePurpose, SanType};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A certificate is valid from a little before now: clocks of nodes differ.
const CLOCK_SKEW: Duration = Duration::from_secs(300);
const DAY: Duration = Duration::from_secs(86_400);
/// Of the authority of development itself: ten years.
const AUTHORITY_DAYS: u32 = 3_650;

/// Why a certificate could not be made or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    #[error("cluster name {0:?} is not 1 to 63 of a-z, 0-9 and -, a letter first and no dash last")]
    Cluster(String),
    #[error("{what} is not readable: {reason}")]
    Unreadable { what: &'static str, reason: String },
    #[error("{what} is not what this authority needs: {reason}")]
    Authority { what: &'static str, reason: String },
    #[error("certificate names no node: {reason} (wanted one name spiffe://CLUSTER/node/NAME)")]
    NoNode { reason: String },
    #[error("certificate of {name} does not belong to its key: {reason}")]
    Key { name: NodeName, reason: String },
    #[error("certificate of {name} would not be accepted by its peers: {reason}")]
    NotAccepted { name: NodeName, reason: String },
    #[error("certificate cannot be made: {0}")]
    NotMade(String),
}

fn not_made(error: impl fmt::Display) -> CertificateError {
    CertificateError::NotMade(error.to_string())
}

fn unreadable(what: &'static str) -> impl Fn(rustls::pki_types::pem::Error) -> CertificateError {
    move |error| CertificateError::Unreadable { what, reason: error.to_string() }
}

/// The one provider of cryptography of this workspace, always named: a process-wide default could be someone else's.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// An authority for development and tests: it makes certificates for the nodes of one cluster. In production a real one does, and
/// nodes only read what it made.
pub struct Authority {
    cluster: String,
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// What a node needs beside the authority's certificate.
#[derive(Clone)]
pub struct NodeCertificate {
    pub certificate_pem: String,
    pub key_pem: String,
}

impl fmt::Debug for NodeCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCertificate").field("certificate_pem", &self.certificate_pem).finish_non_exhaustive()
    }
}

/// The authority's own certificate. Its URI name says the cluster, so that it can be read back.
fn authority_params(cluster: &str) -> Result<CertificateParams, CertificateError> {
    let uri = format!("spiffe://{cluster}").try_into().map_err(not_made)?;
    let mut params = params(&validity(AUTHORITY_DAYS), &format!("{cluster} authority"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.subject_alt_names = vec![SanType::URI(uri)];
    Ok(params)
}

fn params(validity: &Range<SystemTime>, common_name: &str) -> CertificateParams {
    let since_epoch = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let mut params = CertificateParams::default();
    params.not_before = epoch + since_epoch(validity.start);
    params.not_after = epoch + since_epoch(validity.end);
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

fn validity(days: u32) -> Range<SystemTime> {
    let now = SystemTime::now();
    now - CLOCK_SKEW..now + DAY * days
}

/// Ed25519: signatures of one size, so that two simulated handshakes have the same packets.
fn new_key() -> Result<KeyPair, CertificateError> {
    KeyPair::generate_for(&rcgen::PKCS_ED25519).map_err(not_made)
}

impl Authority {
    /// # Errors
    /// A name that is no name for a cluster.
    pub fn new(cluster: &str) -> Result<Self, CertificateError> {
        let params = Self::params_of(cluster)?;
        let key = new_key()?;
        let certificate_pem = params.self_signed(&key).map_err(not_made)?.pem();
        Ok(Self { cluster: cluster.to_owned(), certificate_pem, issuer: Issuer::new(params, key) })
    }

    /// Reads back what [`Self::certificate_pem`] and [`Self::key_pem`] gave.
    ///
    /// # Errors
    /// Text that is neither, a key of another certificate, or an authority that was not made by [`Self::new`].
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, CertificateError> {
        let what = "the authority's certificate";
        let refused = |what, reason: &str| CertificateError::Authority { what, reason: reason.to_owned() };
        let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(unreadable(what))?;
        let key = KeyPair::from_pem(key)
            .map_err(|error| CertificateError::Unreadable { what: "the authority's key", reason: error.to_string() })?;
        let cluster = uri_names(&der).map_err(|reason| refused(what, &reason))?.into_iter().find_map(|name| {
            let cluster = name.strip_prefix("spiffe://")?;
            (!cluster.contains('/')).then(|| cluster.to_owned())
        });
        let cluster = cluster.ok_or_else(|| refused(what, "it names no cluster (wanted spiffe://CLUSTER)"))?;
        let params = Self::params_of(&cluster)?;
        // The certificate that this key would get: it must have the same subject and key, or what it signs fits nobody.
        let again = params.self_signed(&key).map_err(not_made)?;
        let ours = webpki::anchor_from_trusted_cert(again.der()).map_err(not_made)?;
        let given = webpki::anchor_from_trusted_cert(&der).map_err(|error| refused(what, &error.to_string()))?;
        if given.subject_public_key_info != ours.subject_public_key_info {
            return Err(refused("the authority's key", "it is not the key of the certificate"));
        }
        if given.subject != ours.subject {
            return Err(refused(what, "its subject is not one that this authority gives"));
        }
        Ok(Self { cluster, certificate_pem: certificate.to_owned(), issuer: Issuer::new(params, key) })
    }

    fn params_of(cluster: &str) -> Result<CertificateParams, CertificateError> {
        if !is_label(cluster) {
            return Err(CertificateError::Cluster(cluster.chars().take(80).collect()));
        }
        authority_params(cluster)
    }

    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// What every node of the cluster has to trust.
    pub fn certificate_pem(&self) -> String {
        self.certificate_pem.clone()
    }

    /// Whoever has this can be any node.
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// A certificate with a new key, valid from a few minutes ago for `days`.
    ///
    /// # Errors
    /// [`CertificateError::NotMade`].
    pub fn issue(&self, name: &NodeName, days: u32) -> Result<NodeCertificate, CertificateError> {
        self.issue_for(name, validity(days))
    }

    /// As [`Self::issue`], valid for a time that is given.
    ///
    /// # Errors
    /// [`CertificateError::NotMade`].
    pub fn issue_for(&self, name: &NodeName, valid: Range<SystemTime>) -> Result<NodeCertificate, CertificateError> {
        let uri = format!("spiffe://{}/node/{name}", self.cluster).try_into().map_err(not_made)?;
        let dns = name.as_str().try_into().map_err(not_made)?;
        let mut params = params(&valid, name.as_str());
        params.subject_alt_names = vec![SanType::URI(uri), SanType::DnsName(dns)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A node dials and is dialed.
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let key = new_key()?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(not_made)?;
        Ok(NodeCertificate { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// Whom a certificate names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub cluster: String,
    pub name: NodeName,
}

impl Identity {
    /// # Errors
    /// A certificate with no name of a node, or with several: which one it is would be a guess.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let refused = |reason: String| CertificateError::NoNode { reason };
        let names = uri_names(certificate).map_err(refused)?;
        let [name] = names.as_slice() else {
            let shown: Vec<String> = names.iter().map(|name| name.chars().take(120).collect()).collect();
            return Err(refused(format!("its URI names are {shown:?}")));
        };
        let parts = name.strip_prefix("spiffe://").and_then(|rest| rest.split_once("/node/"));
        let named = parts.filter(|(cluster, _)| is_label(cluster));
        let node = named.and_then(|(cluster, node)| Some((cluster, NodeName::new(node).ok()?)));
        let (cluster, name) = node.ok_or_else(|| refused(format!("its URI name is {name:?}")))?;
        Ok(Self { cluster: cluster.to_owned(), name })
    }
}

fn uri_names(certificate: &CertificateDer<'_>) -> Result<Vec<String>, String> {
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|error| error.to_string())?;
    Ok(parsed.valid_uri_names().map(str::to_owned).collect())
}

/// The cluster's authority and a node's own certificate and key: read, and checked as a peer would check them.
#[derive(Clone)]
pub struct Credentials(Arc<Checked>);

struct Checked {
    identity: Identity,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.0.identity).finish()
    }
}

fn certificates(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(unreadable(what))?;
    if found.is_empty() {
        return Err(CertificateError::Unreadable { what, reason: "it holds no certificate".to_owned() });
    }
    Ok(found)
}

impl Credentials {
    /// From PEM text: the authority (or several, while one takes over from another), the node's certificate (with those between it and
    /// the authority, if any) and its key.
    ///
    /// # Errors
    /// What cannot be read, belongs to another key, names no node, has expired, or was not signed by the authority.
    pub fn from_pem(authority: &[u8], certificate: &[u8], key: &[u8]) -> Result<Self, CertificateError> {
        let mut roots = RootCertStore::empty();
        let what = "the authority's certificate";
        for root in certificates(what, authority)? {
            roots.add(root).map_err(|error| CertificateError::Unreadable { what, reason: error.to_string() })?;
        }
        let chain = certificates("the node's certificate", certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(unreadable("the node's key"))?;
        let identity = Identity::of(&chain[0])?;
        let name = identity.name.clone();
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider())
            .map_err(|error| CertificateError::Key { name: name.clone(), reason: error.to_string() })?;
        let checked = Checked { identity, roots: Arc::new(roots), chain, key };
        let refused = |reason| CertificateError::NotAccepted { name, reason };
        checked.accepted_by_a_peer().map_err(refused)?;
        Ok(Self(Arc::new(checked)))
    }

    pub fn name(&self) -> &NodeName {
        &self.0.identity.name
    }

    pub fn cluster(&self) -> &str {
        &self.0.identity.cluster
    }

    /// TLS of a node that dials and of one that is dialed, for this protocol of the application layer.
    pub(crate) fn tls(&self, protocol: &[u8]) -> Result<(ClientConfig, ServerConfig), String> {
        let Checked { chain, key, .. } = &*self.0;
        let (peers, dialers) = self.0.verifiers()?;
        let shown = |error: rustls::Error| error.to_string();
        let versions = [&rustls::version::TLS13];
        let client =
            ClientConfig::builder_with_provider(provider()).with_protocol_versions(&versions).map_err(shown)?;
        let mut client =
            client.with_webpki_verifier(peers).with_client_auth_cert(chain.clone(), key.clone_key()).map_err(shown)?;
        let server =
            ServerConfig::builder_with_provider(provider()).with_protocol_versions(&versions).map_err(shown)?;
        let mut server = server
            .with_client_cert_verifier(dialers)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(shown)?;
        client.alpn_protocols = vec![protocol.to_vec()];
        server.alpn_protocols = vec![protocol.to_vec()];
        // Links live long and 0-RTT is off, so a ticket would be worth nothing, and a resumed session shows no fresh certificate.
        client.resumption = rustls::client::Resumption::disabled();
        server.send_tls13_tickets = 0;
        Ok((client, server))
    }
}

impl Checked {
    fn verifiers(&self) -> Result<(Arc<WebPkiServerVerifier>, Arc<dyn ClientCertVerifier>), String> {
        let peers = WebPkiServerVerifier::builder_with_provider(self.roots.clone(), provider()).build();
        let dialers = WebPkiClientVerifier::builder_with_provider(self.roots.clone(), provider()).build();
        Ok((peers.map_err(|error| error.to_string())?, dialers.map_err(|error| error.to_string())?))
    }

    /// What fails at a peer is better found here, where the reason can be read.
    fn accepted_by_a_peer(&self) -> Result<(), String> {
        let (peers, dialers) = self.verifiers()?;
        let (own, between) = (&self.chain[0], &self.chain[1..]);
        let name = ServerName::try_from(self.identity.name.as_str().to_owned()).map_err(|error| error.to_string())?;
        let now = UnixTime::now();
        peers.verify_server_cert(own, between, &name, &[], now).map_err(|error| error.to_string())?;
        dialers.verify_client_cert(own, between, now).map_err(|error| error.to_string())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        NodeName::new(text).unwrap()
    }

    fn credentials(authority: &Authority, certificate: &NodeCertificate) -> Result<Credentials, CertificateError> {
        let NodeCertificate { certificate_pem, key_pem } = certificate;
        Credentials::from_pem(authority.certificate_pem().as_bytes(), certificate_pem.as_bytes(), key_pem.as_bytes())
    }

    #[test]
    fn a_certificate_says_who_the_node_is() {
        let authority = Authority::new("prod").unwrap();
        let read = credentials(&authority, &authority.issue(&name("a-1"), 30).unwrap()).unwrap();
        assert_eq!((read.cluster(), read.name()), ("prod", &name("a-1")));
        assert!(read.tls(b"x").is_ok());
    }

    #[test]
    fn an_authority_read_back_issues_what_the_first_one_accepts() {
        let authority = Authority::new("prod").unwrap();
        let again = Authority::from_pem(&authority.certificate_pem(), &authority.key_pem()).unwrap();
        assert_eq!(again.cluster(), "prod");
        credentials(&authority, &again.issue(&name("b"), 1).unwrap()).unwrap();
    }

    #[test]
    fn an_authority_with_the_key_of_another_is_refused() {
        let (one, two) = (Authority::new("prod").unwrap(), Authority::new("prod").unwrap());
        let refused = Authority::from_pem(&one.certificate_pem(), &two.key_pem()).unwrap_err();
        assert!(matches!(refused, CertificateError::Authority { what: "the authority's key", .. }), "{refused}");
        let node = one.issue(&name("a"), 1).unwrap();
        let refused = Authority::from_pem(&node.certificate_pem, &node.key_pem).unwrap_err();
        assert!(refused.to_string().contains("names no cluster"), "{refused}");
    }

    #[test]
    fn names_of_clusters_are_labels() {
        for cluster in ["", "a/node/b", "Prod", "a.b", "-a", "1", "a b", "é"] {
            assert_eq!(Authority::new(cluster).unwrap_err(), CertificateError::Cluster(cluster.to_owned()));
        }
    }

    #[test]
    fn what_a_peer_would_refuse_is_refused_when_read() {
        let (ours, theirs) = (Authority::new("prod").unwrap(), Authority::new("prod").unwrap());
        let refused = credentials(&ours, &theirs.issue(&name("a"), 1).unwrap()).unwrap_err();
        assert!(matches!(&refused, CertificateError::NotAccepted { .. }), "{refused}");

        let now = SystemTime::now();
        let past = ours.issue_for(&name("a"), now - DAY * 2..now - DAY).unwrap();
        let refused = credentials(&ours, &past).unwrap_err();
        assert!(refused.to_string().contains("expired"), "{refused}");

        let (one, two) = (ours.issue(&name("a"), 1).unwrap(), ours.issue(&name("a"), 1).unwrap());
        let mixed = NodeCertificate { certificate_pem: one.certificate_pem, key_pem: two.key_pem };
        let refused = credentials(&ours, &mixed).unwrap_err();
        assert!(matches!(&refused, CertificateError::Key { .. }), "{refused}");

        let authority = NodeCertificate { certificate_pem: ours.certificate_pem(), key_pem: ours.key_pem() };
        let refused = credentials(&ours, &authority).unwrap_err();
        assert!(matches!(&refused, CertificateError::NoNode { .. }), "{refused}");
    }

    #[test]
    fn text_that_is_no_certificate_is_refused() {
        let authority = Authority::new("prod").unwrap();
        let node = authority.issue(&name("a"), 1).unwrap();
        let (root, own, key) = (authority.certificate_pem(), node.certificate_pem, node.key_pem);
        for (root, own, key) in [("", &*own, &*key), (&*root, "", &*key), (&*root, &*own, ""), (&*key, &*own, &*key)] {
            let refused = Credentials::from_pem(root.as_bytes(), own.as_bytes(), key.as_bytes()).unwrap_err();
            assert!(matches!(&refused, CertificateError::Unreadable { .. }), "{refused}");
        }
    }

    #[test]
    fn keys_are_not_shown() {
        let authority = Authority::new("prod").unwrap();
        let node = authority.issue(&name("a"), 1).unwrap();
        let shown = format!("{authority:?} {node:?} {:?}", credentials(&authority, &node).unwrap());
        assert!(!shown.contains("PRIVATE KEY"), "{shown}");
    }
}
