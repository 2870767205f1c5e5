//! From a new connection to a peer that is known: certificates, hellos, and the reasons to refuse.

use crate::certificate::Identity;
use crate::link::{NodeName, Peer};
use crate::mesh::Shared;
use crate::registry::NotTaken;
use crate::wire::{Control, FrameCutter, HELLO_BYTES_MAX, Hello, Offer, WireError};
use bytes::{BufMut, Bytes, BytesMut};
use quinn::rustls::pki_types::CertificateDer;
use quinn::{Connection, ConnectionError, ReadError, RecvStream, SendStream, VarInt, WriteError};

/// Why a connection was closed, as a number of the application layer. Not 0, which quinn says for a connection that was only dropped.
pub(crate) mod code {
    use quinn::VarInt;

    pub const GOODBYE: VarInt = VarInt::from_u32(1);
    pub const REFUSED: VarInt = VarInt::from_u32(2);
    pub const DUPLICATE: VarInt = VarInt::from_u32(3);
    pub const REPLACED: VarInt = VarInt::from_u32(4);
    pub const VIOLATION: VarInt = VarInt::from_u32(5);
    pub const CLOSED: VarInt = VarInt::from_u32(6);
}

/// A reason has to fit into the one packet that closes a connection.
const REASON_BYTES_MAX: usize = 900;
pub(crate) const PRIORITY_CONTROL: i32 = 20;

/// Why a connection did not become a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotUp {
    /// By this side or the other: who, and why, with both values.
    Refused {
        peer: String,
        why: String,
    },
    /// There is a link to the peer, and it stays.
    Duplicate,
    Lost(String),
}

/// A peer that is known, on a connection that is not a link yet.
pub(crate) struct Greeted {
    pub connection: Connection,
    pub peer: Peer,
    pub offer: Offer,
    pub control: ControlStream,
}

pub(crate) struct ControlStream {
    pub send: SendStream,
    pub receive: RecvStream,
    pub cutter: FrameCutter,
}

/// Which side of the connection this node is.
#[derive(Clone, Copy)]
pub(crate) enum Side<'a> {
    Dialed { expected: &'a NodeName },
    Accepted,
}

impl ControlStream {
    /// # Errors
    /// A stream that ends, or a frame that is none of ours.
    pub async fn next(&mut self) -> Result<Control, ControlError> {
        loop {
            if let Some(frame) = self.cutter.cut()? {
                return Ok(Control::decode(frame)?);
            }
            let chunk = self.receive.read_chunk(usize::MAX, true).await?.ok_or(ControlError::Ended)?;
            self.cutter.push(chunk.bytes);
        }
    }

    async fn say(&mut self, frame: &[u8]) -> Result<(), WriteError> {
        let mut bytes = BytesMut::with_capacity(4 + frame.len());
        bytes.put_u32_le(frame.len() as u32);
        bytes.put_slice(frame);
        self.send.write_chunk(bytes.freeze()).await
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Read(#[from] ReadError),
    #[error("control stream ended")]
    Ended,
}

/// Whether a peer is one to have a link with.
///
/// # Errors
/// What differs, with both values.
pub(crate) fn check(ours: &Hello, theirs: &Hello, certified: &Identity) -> Result<(), String> {
    let (own, name) = (&ours.name, &theirs.name);
    if *name != certified.name {
        return Err(format!("node name is {name} in the hello, {} in the certificate", certified.name));
    }
    if theirs.cluster != certified.cluster {
        let Identity { cluster, name } = certified;
        return Err(format!("cluster of {name} is {} in the hello, {cluster} in the certificate", theirs.cluster));
    }
    if theirs.codec != ours.codec {
        return Err(format!("codec number of {name} is {}, of {own} is {}", theirs.codec, ours.codec));
    }
    if theirs.settings_digest != ours.settings_digest {
        let (theirs, ours) = (theirs.settings_digest, ours.settings_digest);
        return Err(format!("settings digest of {name} is {theirs:016x}, of {own} is {ours:016x}"));
    }
    Ok(())
}

/// The same for what is known before the hello.
fn check_certificate(ours: &Hello, certified: &Identity, side: Side<'_>) -> Result<(), String> {
    let (own, name) = (&ours.name, &certified.name);
    if certified.cluster != ours.cluster {
        return Err(format!("cluster of {name} is {}, of {own} is {}", certified.cluster, ours.cluster));
    }
    if name == own {
        return Err(format!("node name is {name} on both sides"));
    }
    match side {
        Side::Dialed { expected } if expected != name => {
            Err(format!("node name is {name} there, {expected} was dialed"))
        }
        Side::Dialed { .. } | Side::Accepted => Ok(()),
    }
}

/// Tells the peer why before the connection is gone.
fn refuse(connection: &Connection, peer: &str, why: &str) -> NotUp {
    close(connection, code::REFUSED, why);
    NotUp::Refused { peer: peer.to_owned(), why: why.to_owned() }
}

pub(crate) fn close(connection: &Connection, code: VarInt, reason: &str) {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    connection.close(code, &reason.as_bytes()[..end]);
}

/// A text from a peer, for people to read: short and without control characters.
pub(crate) fn readable(reason: &[u8]) -> String {
    let text = String::from_utf8_lossy(&reason[..reason.len().min(REASON_BYTES_MAX)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What a connection's end before it was a link means.
pub(crate) fn not_up(peer: &str, error: &ConnectionError) -> NotUp {
    let refused = |why: String| NotUp::Refused { peer: peer.to_owned(), why };
    match error {
        ConnectionError::ApplicationClosed(closed) if closed.error_code == code::REFUSED => {
            refused(format!("refused there: {}", readable(&closed.reason)))
        }
        ConnectionError::ApplicationClosed(closed) if closed.error_code == code::DUPLICATE => NotUp::Duplicate,
        // TLS: a certificate that is not accepted, no common protocol.
        ConnectionError::TransportError(error) if is_tls(error.code) => refused(error.to_string()),
        ConnectionError::ConnectionClosed(closed) if is_tls(closed.error_code) => {
            refused(format!("refused there: {closed}"))
        }
        other => NotUp::Lost(other.to_string()),
    }
}

fn is_tls(code: quinn::TransportErrorCode) -> bool {
    (0x100..0x200).contains(&u64::from(code))
}

fn control_lost(connection: &Connection, peer: &str, error: &ControlError) -> NotUp {
    match error {
        ControlError::Read(ReadError::ConnectionLost(error)) => not_up(peer, error),
        ControlError::Read(_) | ControlError::Ended => NotUp::Lost(error.to_string()),
        ControlError::Wire(error) => refuse(connection, peer, &error.to_string()),
    }
}

fn write_lost(peer: &str, error: &WriteError) -> NotUp {
    match error {
        WriteError::ConnectionLost(error) => not_up(peer, error),
        other => NotUp::Lost(other.to_string()),
    }
}

fn certified(connection: &Connection) -> Result<Identity, String> {
    let chain = connection.peer_identity().and_then(|chain| chain.downcast::<Vec<CertificateDer<'static>>>().ok());
    let first = chain.as_ref().and_then(|chain| chain.first()).ok_or("peer has shown no certificate")?;
    Identity::of(first).map_err(|error| error.to_string())
}

/// Exchanges hellos. A connection that is refused is closed, with the reason for the peer.
pub(crate) async fn greet(shared: &Shared, connection: Connection, side: Side<'_>) -> Result<Greeted, NotUp> {
    let ours = &shared.hello;
    let address = connection.remote_address().to_string();
    let identity = certified(&connection).map_err(|why| refuse(&connection, &address, &why))?;
    let peer = identity.name.as_str();
    check_certificate(ours, &identity, side).map_err(|why| refuse(&connection, peer, &why))?;
    let opened = match side {
        Side::Dialed { .. } => connection.open_bi().await,
        Side::Accepted => connection.accept_bi().await,
    };
    let (send, receive) = opened.map_err(|error| not_up(peer, &error))?;
    // Only a stream that is gone has no priority, and then writing fails.
    let _ = send.set_priority(PRIORITY_CONTROL);
    let mut control = ControlStream { send, receive, cutter: FrameCutter::new(HELLO_BYTES_MAX) };
    if let Side::Dialed { .. } = side {
        control.say(&ours.encode()).await.map_err(|error| write_lost(peer, &error))?;
    }
    let said = control.next().await.map_err(|error| control_lost(&connection, peer, &error))?;
    let theirs = match said {
        Control::Hello(body) => Hello::decode(&body).map_err(|error| error.to_string()),
        other => Err(format!("a hello comes first, not a {}", other.name())),
    };
    let checked = theirs.and_then(|theirs| {
        check(ours, &theirs, &identity)?;
        let peer = Peer { name: theirs.name, incarnation: theirs.incarnation };
        shared.registry.admits(&peer).map_err(|error| error.to_string())?;
        Ok((peer, theirs.offer))
    });
    let (peer, theirs) = checked.map_err(|why| refuse(&connection, peer, &why))?;
    if let Side::Accepted = side {
        control.say(&ours.encode()).await.map_err(|error| write_lost(peer.name.as_str(), &error))?;
    }
    let offer = ours.offer.agreed(theirs);
    Ok(Greeted { connection, peer, offer, control })
}

impl Greeted {
    /// The choice of a peer that has the greater name.
    pub async fn chosen(&mut self) -> Result<u64, NotUp> {
        let peer = self.peer.name.as_str();
        match self.control.next().await {
            Ok(Control::Use { serial }) => Ok(serial),
            Ok(other) => Err(refuse(&self.connection, peer, &format!("a choice comes next, not a {}", other.name()))),
            Err(error) => Err(control_lost(&self.connection, peer, &error)),
        }
    }

    pub fn not_taken(&self, why: &NotTaken) -> NotUp {
        match why {
            NotTaken::Duplicate => {
                close(&self.connection, code::DUPLICATE, &why.to_string());
                NotUp::Duplicate
            }
            NotTaken::Stale { .. } | NotTaken::TooMany { .. } => {
                refuse(&self.connection, self.peer.name.as_str(), &why.to_string())
            }
        }
    }
}

/// The body of the frame by which the greater name says that it uses a connection.
pub(crate) fn choice(serial: u64) -> Bytes {
    Bytes::copy_from_slice(&serial.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        NodeName::new(text).unwrap()
    }

    fn hello(own: &str) -> Hello {
        let offer = Offer { lanes: 1, bulk_streams_max: 1, frame_bytes_max: 1, bulk_bytes_max: 1 };
        Hello { codec: 1, incarnation: 1, settings_digest: 1, offer, name: name(own), cluster: "prod".into() }
    }

    fn identity(node: &str, cluster: &str) -> Identity {
        Identity { cluster: cluster.into(), name: name(node) }
    }

    #[test]
    fn refusals_name_both_values() {
        let (ours, sound) = (hello("a"), identity("b", "prod"));
        let refused = |change: fn(&mut Hello)| {
            let mut theirs = hello("b");
            change(&mut theirs);
            check(&ours, &theirs, &sound).unwrap_err()
        };
        assert_eq!(check(&ours, &hello("b"), &sound), Ok(()));
        assert_eq!(refused(|h| h.codec = 2), "codec number of b is 2, of a is 1");
        let digests = "settings digest of b is 000000000000000f, of a is 0000000000000001";
        assert_eq!(refused(|h| h.settings_digest = 15), digests);
        assert_eq!(refused(|h| h.name = name("c")), "node name is c in the hello, b in the certificate");
        let clusters = "cluster of b is test in the hello, prod in the certificate";
        assert_eq!(refused(|h| h.cluster = "test".into()), clusters);
    }

    #[test]
    fn certificates_of_others_are_refused_with_both_values() {
        let refused = |identity, side| check_certificate(&hello("a"), &identity, side);
        assert_eq!(refused(identity("b", "prod"), Side::Accepted), Ok(()));
        let clusters = "cluster of b is test, of a is prod";
        assert_eq!(refused(identity("b", "test"), Side::Accepted), Err(clusters.into()));
        assert_eq!(refused(identity("a", "prod"), Side::Accepted), Err("node name is a on both sides".into()));
        let expected = name("c");
        let dialed = refused(identity("b", "prod"), Side::Dialed { expected: &expected });
        assert_eq!(dialed, Err("node name is b there, c was dialed".into()));
    }

    #[test]
    fn a_text_from_a_peer_is_short_and_plain() {
        assert_eq!(readable(b"a\nb\xff"), "a b\u{fffd}");
        assert_eq!(readable(&[b'x'; 5000]).len(), REASON_BYTES_MAX);
    }
}
