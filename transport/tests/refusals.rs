//! Who must not come in: every reason, told on both sides with both values.

mod suite;

use quic::{Quic, raw};
use starling_transport::NodeCertificate;
use starling_transport::wire::{Hello, PROTOCOL};
use suite::{Allowed, Fabric, FabricNode, name};

#[path = "suite/quic.rs"]
mod quic;

fn assert_names(why: &str, values: &[&str]) {
    assert!(values.iter().all(|value| why.contains(value)), "{why:?} does not name all of {values:?}");
}

#[tokio::test]
async fn another_settings_digest_is_refused_on_both_sides() {
    let quic = Quic::new();
    let mut settings = quic.settings(&name("a"), 1, &Allowed::default());
    settings.settings_digest = 0xbeef;
    let (a, b) = (quic::start(settings).await, quic.node("b", 1, &Allowed::default()).await);
    for (dials, dialed) in [(&a, &b), (&b, &a)] {
        dials.connect(dialed);
    }
    for node in [&a, &b] {
        let (_, why) = node.record().refusal().await;
        assert_names(&why, &["settings digest", "000000000000beef", "0000000000000007"]);
        assert!(node.links().is_empty());
    }
}

/// The side that dials tries again and again, but says it once; the other side says each time what it did.
#[tokio::test]
async fn a_dialer_tells_the_same_refusal_once() {
    let quic = Quic::new();
    let mut settings = quic.settings(&name("a"), 1, &Allowed::default());
    settings.settings_digest = 8;
    let (a, b) = (quic::start(settings).await, quic.node("b", 1, &Allowed::default()).await);
    a.connect(&b);
    b.record().until("three refusals", |told| (told.len() >= 3).then_some(())).await;
    assert_eq!(a.record().told().len(), 1);
}

#[tokio::test]
async fn another_authority_is_refused_on_both_sides() {
    let (ours, theirs) = (Quic::new(), Quic::new());
    let a = ours.node("a", 1, &Allowed::default()).await;
    let b = theirs.node("b", 1, &Allowed::default()).await;
    a.connect(&b);
    let (peer, why) = a.record().refusal().await;
    assert_eq!(peer, "b");
    assert_names(&why, &["certificate"]);
    assert_names(&b.record().refusal().await.1, &["refused there"]);
}

#[tokio::test]
async fn another_cluster_of_the_same_authority_is_refused_on_both_sides() {
    let quic = Quic::new();
    let a = quic.node("a", 1, &Allowed::default()).await;
    let elsewhere = quic.certificate(&["spiffe://elsewhere/node/b"], "b");
    let mut settings = quic.settings(&name("b"), 1, &Allowed::default());
    settings.credentials = quic.read(&elsewhere).unwrap();
    let b = quic::start(settings).await;
    b.connect(&a);
    for node in [&a, &b] {
        assert_names(&node.record().refusal().await.1, &["cluster", "elsewhere", "test"]);
    }
}

#[tokio::test]
async fn who_is_not_the_one_that_was_dialed_is_refused_on_both_sides() {
    let quic = Quic::new();
    let (a, b) = (quic.node("a", 1, &Allowed::default()).await, quic.node("b", 1, &Allowed::default()).await);
    a.mesh.connect(name("c"), b.mesh.local_addr().to_string());
    let (peer, why) = a.record().refusal().await;
    assert_eq!(peer, "c");
    assert_names(&why, &["\"c\"", "\"b\""]);
    assert_names(&b.record().refusal().await.1, &["refused there"]);
}

#[tokio::test]
async fn a_node_of_the_same_name_is_refused_on_both_sides() {
    let quic = Quic::new();
    let (one, two) = (quic.node("a", 1, &Allowed::default()).await, quic.node("a", 2, &Allowed::default()).await);
    one.connect(&two);
    for node in [&one, &two] {
        assert_names(&node.record().refusal().await.1, &["node name is a on both sides"]);
    }
}

/// A dialer that the TLS layer does not take is refused, and both sides hear of it.
async fn refused_by_tls(certificate: impl FnOnce(&Quic) -> Option<NodeCertificate>, protocol: &[u8], reason: &str) {
    let quic = Quic::new();
    let a = quic.node("a", 1, &Allowed::default()).await;
    let (authority, certificate) = (quic.authority.certificate_pem(), certificate(&quic));
    let (_endpoint, connected) = raw::dial(&authority, certificate.as_ref(), protocol, a.mesh.local_addr(), "a").await;
    // The dialer's handshake may be through before the other side has seen its certificate.
    let told = match connected {
        Ok(connection) => connection.closed().await,
        Err(error) => error,
    };
    assert!(matches!(told, quinn::ConnectionError::ConnectionClosed(_)), "{told}");
    assert_names(&a.record().refusal().await.1, &[reason]);
    assert!(a.links().is_empty());
}

#[tokio::test]
async fn an_expired_certificate_is_refused() {
    refused_by_tls(|quic| Some(quic.expired()), PROTOCOL, "expired").await;
}

#[tokio::test]
async fn who_has_no_certificate_is_refused() {
    refused_by_tls(|_| None, PROTOCOL, "certificate").await;
}

#[tokio::test]
async fn who_speaks_another_protocol_is_refused() {
    let sound = |quic: &Quic| Some(quic.authority.issue(&name("b"), 1).unwrap());
    refused_by_tls(sound, b"h3", "protocol").await;
}

/// Says something as its first word, with a certificate that is sound, and is refused with this reason on both sides.
async fn refused_after(said: impl FnOnce(&mut Hello) -> Option<Vec<u8>>, values: &[&str]) {
    let quic = Quic::new();
    let a = quic.node("a", 1, &Allowed::default()).await;
    let mut hello = quic.hello("b");
    let frame = said(&mut hello).unwrap_or_else(|| hello.encode().to_vec());
    let raw = raw::Raw::connect(&quic, "b", &a).await;
    let (mut send, _receive) = raw.connection.open_bi().await.unwrap();
    send.write_all(&raw::framed(&frame)).await.unwrap();
    assert_names(&raw.closed().await, values);
    assert_names(&a.record().refusal().await.1, values);
    assert!(a.links().is_empty());
}

#[tokio::test]
async fn another_codec_is_refused_on_both_sides() {
    let other = |hello: &mut Hello| {
        hello.codec = 9;
        None
    };
    refused_after(other, &["codec number of b is 9, of a is 1"]).await;
}

#[tokio::test]
async fn another_version_is_refused_on_both_sides() {
    let other = |hello: &mut Hello| {
        let mut bytes = hello.encode().to_vec();
        bytes[1] = 2;
        Some(bytes)
    };
    refused_after(other, &["protocol version is 2 there, 1 here"]).await;
}

#[tokio::test]
async fn a_hello_that_differs_from_its_certificate_is_refused_on_both_sides() {
    let other_name = |hello: &mut Hello| {
        hello.name = name("c");
        None
    };
    refused_after(other_name, &["node name is c in the hello, b in the certificate"]).await;
    let other_cluster = |hello: &mut Hello| {
        hello.cluster = "prod".to_owned();
        None
    };
    refused_after(other_cluster, &["cluster of b is prod in the hello, test in the certificate"]).await;
}

#[tokio::test]
async fn what_is_no_hello_is_refused() {
    refused_after(|_| Some(vec![]), &["not known"]).await;
    refused_after(|_| Some(vec![9; 40]), &["kind Some(9) is not known"]).await;
    refused_after(|_| Some(vec![1, 1, 0]), &["hello of 2 bytes ends early"]).await;
    refused_after(|_| Some(vec![3, 1, 0]), &["a hello comes first"]).await;
    refused_after(|_| Some(vec![1; 4000]), &["frame of 4000 bytes (limit 256)"]).await;
}

#[tokio::test]
async fn a_certificate_with_two_names_is_refused() {
    let quic = Quic::new();
    let two = quic.certificate(&["spiffe://test/node/b", "spiffe://test/node/c"], "b");
    let why = quic.read(&two).unwrap_err().to_string();
    assert_names(&why, &["node/b", "node/c"]);
    let a = quic.node("a", 1, &Allowed::default()).await;
    let authority = quic.authority.certificate_pem();
    let (_endpoint, connected) = raw::dial(&authority, Some(&two), PROTOCOL, a.mesh.local_addr(), "a").await;
    let closed = connected.unwrap().closed().await.to_string();
    assert_names(&closed, &["node/b", "node/c"]);
    assert_names(&a.record().refusal().await.1, &["node/b", "node/c"]);
}

#[tokio::test]
async fn links_beyond_the_limit_are_refused_on_both_sides() {
    let quic = Quic::new();
    let mut settings = quic.settings(&name("b"), 1, &Allowed::default());
    settings.limits.links_max = 1;
    let b = quic::start(settings).await;
    let first = quic.node("a", 1, &Allowed::default()).await;
    first.connect(&b);
    first.record().link("b", 1).await;
    b.record().link("a", 1).await;
    // One with a greater name and one with a lesser: either side may be the one that chooses.
    for other in ["aa", "c"] {
        let other = quic.node(other, 1, &Allowed::default()).await;
        other.connect(&b);
        assert_names(&other.record().refusal().await.1, &["1 links are up (limit 1)"]);
        assert!(other.links().is_empty());
    }
    assert_eq!(b.links().len(), 1);
    b.record().check();
}
