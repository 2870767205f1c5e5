//! A peer with a sound certificate that breaks the rules: its link ends with the reason, and the node serves others on.

mod suite;

#[path = "suite/quic.rs"]
mod quic;

use bytes::Bytes;
use quic::{Quic, QuicNode, raw};
use starling_transport::{DownReason, Lane};
use std::time::Duration;
use suite::{Allowed, Fabric, FabricNode};

struct Case {
    node: QuicNode,
    raw: raw::Raw,
    control: quinn::SendStream,
    _receive: quinn::RecvStream,
}

impl Case {
    async fn new() -> Self {
        let quic = Quic::new();
        let allowed = Allowed { frame_bytes_max: 1000, bulk_bytes_max: 5000, ..Allowed::default() };
        let node = quic.node("a", 1, &allowed).await;
        let raw = raw::Raw::connect(&quic, "b", &node).await;
        let (control, receive) = raw.greet(&quic, "b").await;
        node.record.link("b", 1).await;
        Self { node, raw, control, _receive: receive }
    }

    /// The link ended for this reason, which the peer was told too.
    async fn ended(self, why: &str) {
        let reason = self.node.record.down("b", 1).await;
        assert!(matches!(&reason, DownReason::Violation(text) if text.contains(why)), "{reason}, not {why}");
        let told = self.raw.closed().await;
        assert!(told.contains(why), "{told}, not {why}");
        self.node.record.check();
    }
}

#[tokio::test]
async fn a_frame_beyond_the_limit_ends_the_link() {
    for kind in [1, 16, 17] {
        let case = Case::new().await;
        let mut bytes = vec![kind];
        bytes.extend(raw::framed(b"sound"));
        bytes.extend(1001u32.to_le_bytes());
        let _stream = case.raw.stream(&bytes).await;
        let lane = if kind == 1 { Lane::Rounds } else { Lane::Messages(kind - 16) };
        assert_eq!(case.node.record.frames(lane, 1).await, [&b"sound"[..]]);
        case.ended("frame of 1001 bytes (limit 1000)").await;
    }
    let mut case = Case::new().await;
    case.control.write_all(&1002u32.to_le_bytes()).await.unwrap();
    case.ended("frame of 1002 bytes (limit 1001)").await;
}

#[tokio::test]
async fn a_stream_that_is_none_of_ours_ends_the_link() {
    for kind in [0, 3, 15, 18, 19, 255] {
        let case = Case::new().await;
        let _stream = case.raw.stream(&[kind, 0, 0, 0, 0]).await;
        case.ended(&format!("stream of kind {kind} is not known")).await;
    }
    let case = Case::new().await;
    case.raw.connection.open_uni().await.unwrap().finish().unwrap();
    case.ended("a stream was empty").await;
}

#[tokio::test]
async fn a_lane_that_is_opened_twice_ends_the_link() {
    let case = Case::new().await;
    let _one = case.raw.stream(&[17]).await;
    let _two = case.raw.stream(&[17]).await;
    case.ended("Messages(1) was opened twice").await;
}

#[tokio::test]
async fn a_lane_that_breaks_off_ends_the_link() {
    let case = Case::new().await;
    case.raw.stream(&[16, 5, 0, 0, 0, 1]).await.finish().unwrap();
    case.ended("Messages(0) ended within a frame").await;
    let case = Case::new().await;
    let mut stream = case.raw.stream(&[16, 1, 0, 0, 0, 1]).await;
    case.node.record.frames(Lane::Messages(0), 1).await;
    stream.reset(7u32.into()).unwrap();
    case.ended("Messages(0) was broken off").await;
}

#[tokio::test]
async fn a_body_beyond_the_limit_ends_the_link() {
    let case = Case::new().await;
    let mut bytes = vec![2];
    bytes.resize(5001, 0);
    case.raw.stream(&bytes).await.finish().unwrap();
    assert_eq!(case.node.record.bodies(1).await[0].len(), 5000);
    bytes.push(0);
    case.raw.stream(&bytes).await.finish().unwrap();
    case.ended("a body has more than 5000 bytes").await;
}

#[tokio::test]
async fn a_word_out_of_its_place_ends_the_link() {
    let goodbye: &[u8] = &[4, 0, 0, 0, 0, 0, 0, 0, 0];
    let cases: [(&[&[u8]], &str); 6] = [
        (&[&[]], "control frame of kind None is not known"),
        (&[&[99]], "control frame of kind Some(99) is not known"),
        (&[&[2, 1]], "control frame of kind 2 has 1 bytes"),
        (&[&[2, 1, 0, 0, 0, 0, 0, 0, 0]], "a choice on a link that is up"),
        (&[&[1, 1]], "a hello on a link that is up"),
        (&[goodbye, goodbye], "goodbye was said twice"),
    ];
    for (words, why) in cases {
        let mut case = Case::new().await;
        for word in words {
            case.control.write_all(&raw::framed(word)).await.unwrap();
        }
        case.ended(why).await;
    }
    let mut case = Case::new().await;
    case.control.finish().unwrap();
    case.ended("the control stream ended").await;
}

#[tokio::test]
async fn a_datagram_that_is_none_of_ours_ends_the_link() {
    for (datagram, why) in [(&[][..], "kind None"), (&[7, 7][..], "kind Some(7)")] {
        let case = Case::new().await;
        case.raw.connection.send_datagram(Bytes::copy_from_slice(datagram)).unwrap();
        case.ended(why).await;
    }
}

/// A peer that does not answer a goodbye is not waited for beyond the deadline.
#[tokio::test]
async fn a_goodbye_that_is_not_answered_ends_at_its_deadline() {
    let case = Case::new().await;
    case.node.mesh.close(Duration::from_millis(50)).await;
    assert_eq!(case.node.record.down("b", 1).await, DownReason::Closed);
    assert!(case.raw.closed().await.contains("this side closed it"));
    assert!(case.node.mesh.links().is_empty());
}

/// A peer that says goodbye and then stays does not keep its place.
#[tokio::test]
async fn a_goodbye_without_an_end_is_given_up() {
    let quic = Quic::new();
    let mut settings = quic.settings(&suite::name("a"), 1, &Allowed::default());
    settings.timings.goodbye = Duration::from_millis(50);
    let node = quic::start(settings).await;
    let raw = raw::Raw::connect(&quic, "b", &node).await;
    let (mut control, _receive) = raw.greet(&quic, "b").await;
    control.write_all(&raw::framed(&[4, 0, 0, 0, 0, 0, 0, 0, 0])).await.unwrap();
    let reason = node.record.down("b", 1).await;
    assert!(matches!(&reason, DownReason::Lost(why) if why.contains("goodbye took more than 50ms")), "{reason}");
    node.record.check();
}

/// Number 0 is what QUIC says for whoever dropped a connection: nobody has said that all has arrived.
#[tokio::test]
async fn a_connection_that_was_dropped_is_lost_and_no_goodbye() {
    let case = Case::new().await;
    case.raw.connection.close(0u32.into(), b"");
    let reason = case.node.record.down("b", 1).await;
    assert!(matches!(reason, DownReason::Lost(_)), "{reason}");
}

/// Bytes that are the same each time (a linear congruential generator).
struct Noise(u64);

impl Noise {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.byte()).collect()
    }
}

/// Noise on every carrier, before and after the greeting: each time the link or the connection ends, nothing panics, and a peer
/// that keeps the rules is served all the while.
#[tokio::test]
async fn noise_harms_nobody_else() {
    let quic = Quic::new();
    let allowed = Allowed::default();
    let (node, friend) = (quic.node("a", 1, &allowed).await, quic.node("c", 1, &allowed).await);
    friend.connect(&node);
    let link = friend.record.link("a", 1).await;
    let mut noise = Noise(1);
    for round in 0..40 {
        let raw = raw::Raw::connect(&quic, "b", &node).await;
        let mut streams = Vec::new();
        if round % 2 == 0 {
            streams.push(raw.greet(&quic, "b").await.0);
        } else {
            streams.push(raw.connection.open_bi().await.unwrap().0);
        }
        for kind in [1, 2, 16, 17, noise.byte()] {
            // The node may have closed it meanwhile, which is what this waits for.
            if let Ok(mut stream) = raw.connection.open_uni().await {
                let _ = stream.write_all(&[kind]).await;
                streams.push(stream);
            }
        }
        for stream in &mut streams {
            let length = usize::from(noise.byte()) * 8;
            let _ = stream.write_all(&noise.bytes(length)).await;
        }
        let _ = raw.connection.send_datagram(Bytes::from(noise.bytes(20)));
        // What was noise by chance a sound beginning is ended here; a length beyond every limit ends the rest.
        for stream in &mut streams {
            let _ = stream.write_all(&[255; 2000]).await;
        }
        raw.closed().await;
        link.send(Lane::Control, Bytes::from(vec![round])).unwrap();
    }
    let served: Vec<Bytes> = (0..40).map(|round| Bytes::from(vec![round])).collect();
    assert_eq!(node.record.frames(Lane::Control, 40).await, served);
    assert!(link.is_up());
    assert_eq!(node.links().len(), 1);
    node.record.check();
}
