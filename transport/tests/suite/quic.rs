//! Nodes over QUIC on loopback, and a client that speaks QUIC but keeps none of the mesh's rules.

#![allow(dead_code)]

use super::suite::{Allowed, Fabric, FabricNode, Record, name};
use rcgen::{CertificateParams, DnType, Issuer, KeyPair, SanType};
use starling_transport::codec::CODEC_NUMBER;
use starling_transport::wire::{Hello, Offer};
use starling_transport::{Authority, CertificateError, Credentials, Limits, Link, Mesh, MeshSettings};
use starling_transport::{NodeCertificate, NodeName, Timings};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::runtime::Runtime;

/// Nodes of one cluster on loopback.
pub struct Quic {
    pub authority: Authority,
}

impl Quic {
    pub fn new() -> Self {
        Self { authority: Authority::new("test").unwrap() }
    }

    pub fn read(&self, certificate: &NodeCertificate) -> Result<Credentials, CertificateError> {
        let NodeCertificate { certificate_pem, key_pem } = certificate;
        let authority = self.authority.certificate_pem();
        Credentials::from_pem(authority.as_bytes(), certificate_pem.as_bytes(), key_pem.as_bytes())
    }

    pub fn settings(&self, node: &NodeName, incarnation: u64, allowed: &Allowed) -> MeshSettings {
        let Allowed { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, urgent_bytes_max } = *allowed;
        let limits =
            Limits { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, urgent_bytes_max, ..Limits::default() };
        MeshSettings {
            incarnation,
            settings_digest: 7,
            listen: "127.0.0.1:0".parse().unwrap(),
            credentials: self.read(&self.authority.issue(node, 1).unwrap()).unwrap(),
            limits,
            timings: Timings::default(),
        }
    }

    /// What a node of this cluster would say first.
    pub fn hello(&self, node: &str) -> Hello {
        let offer = Offer { lanes: 2, bulk_streams_max: 4, frame_bytes_max: 1 << 20, bulk_bytes_max: 8 << 20 };
        Hello {
            codec: CODEC_NUMBER,
            incarnation: 1,
            settings_digest: 7,
            offer,
            name: name(node),
            cluster: "test".to_owned(),
        }
    }

    pub fn expired(&self) -> NodeCertificate {
        let (now, day) = (SystemTime::now(), Duration::from_secs(86_400));
        self.authority.issue_for(&name("b"), now - day * 2..now - day).unwrap()
    }

    /// A certificate of this authority that says something the authority would not.
    pub fn certificate(&self, uris: &[&str], dns: &str) -> NodeCertificate {
        let mut root = CertificateParams::default();
        root.distinguished_name = rcgen::DistinguishedName::new();
        root.distinguished_name.push(DnType::CommonName, "test authority");
        let issuer = Issuer::new(root, KeyPair::from_pem(&self.authority.key_pem()).unwrap());
        let mut params = CertificateParams::new([dns.to_owned()]).unwrap();
        params.subject_alt_names.extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())));
        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let certificate_pem = params.signed_by(&key, &issuer).unwrap().pem();
        NodeCertificate { certificate_pem, key_pem: key.serialize_pem() }
    }
}

/// A node on a runtime of its own, so that it can end as a process that is killed does: nothing of it runs on.
pub struct QuicNode {
    pub mesh: Mesh,
    pub record: Arc<Record>,
    pub name: NodeName,
    runtime: Option<Runtime>,
}

pub async fn start(settings: MeshSettings) -> QuicNode {
    // One thread, so that nothing runs beside the end of the runtime.
    start_on_threads(1, settings).await
}

pub async fn start_on_threads(threads: usize, settings: MeshSettings) -> QuicNode {
    let (record, name) = (Arc::<Record>::default(), settings.credentials.name().clone());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap();
    let mesh = runtime.spawn(Mesh::start(settings, record.clone())).await.unwrap().unwrap();
    QuicNode { mesh, record, name, runtime: Some(runtime) }
}

impl Drop for QuicNode {
    fn drop(&mut self) {
        let runtime = self.runtime.take().unwrap();
        runtime.shutdown_background();
    }
}

impl Fabric for Quic {
    type Node = QuicNode;

    async fn node(&self, node: &str, incarnation: u64, allowed: &Allowed) -> QuicNode {
        start(self.settings(&name(node), incarnation, allowed)).await
    }
}

impl FabricNode for QuicNode {
    fn record(&self) -> &Arc<Record> {
        &self.record
    }

    fn connect(&self, other: &Self) {
        self.mesh.connect(other.name.clone(), other.mesh.local_addr().to_string());
    }

    fn links(&self) -> Vec<Link> {
        self.mesh.links()
    }

    async fn close(&self, deadline: Duration) {
        self.mesh.close(deadline).await;
    }

    fn crash(self) {
        // The runtime ends before the mesh is dropped, so nobody is left to say anything.
        drop(self);
    }
}

pub mod raw {
    use super::{Quic, QuicNode};
    use bytes::Bytes;
    use quinn::crypto::rustls::QuicClientConfig;
    use quinn::{Connection, ConnectionError, Endpoint, RecvStream, SendStream};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use starling_transport::NodeCertificate;
    use starling_transport::wire::{Control, FrameCutter, HELLO_BYTES_MAX, PROTOCOL};
    use std::net::SocketAddr;
    use std::sync::Arc;

    pub fn framed(body: &[u8]) -> Vec<u8> {
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.extend(body);
        frame
    }

    /// Dials with plain QUIC. The endpoint has to be kept.
    pub async fn dial(
        authority: &str,
        certificate: Option<&NodeCertificate>,
        protocol: &[u8],
        address: SocketAddr,
        name: &str,
    ) -> (Endpoint, Result<Connection, ConnectionError>) {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let mut tls = match certificate {
            None => builder.with_no_client_auth(),
            Some(NodeCertificate { certificate_pem, key_pem }) => {
                let chain = vec![CertificateDer::from_pem_slice(certificate_pem.as_bytes()).unwrap()];
                let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        tls.alpn_protocols = vec![protocol.to_vec()];
        let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        let endpoint = Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let connected = endpoint.connect_with(config, address, name).unwrap().await;
        (endpoint, connected)
    }

    /// A peer with a sound certificate.
    pub struct Raw {
        pub connection: Connection,
        _endpoint: Endpoint,
    }

    impl Raw {
        pub async fn connect(quic: &Quic, own: &str, node: &QuicNode) -> Self {
            let certificate = quic.authority.issue(&super::name(own), 1).unwrap();
            let authority = quic.authority.certificate_pem();
            let address = node.mesh.local_addr();
            let (endpoint, connected) =
                dial(&authority, Some(&certificate), PROTOCOL, address, node.name.as_str()).await;
            Self { connection: connected.unwrap(), _endpoint: endpoint }
        }

        /// Waits for the end of the connection, and what it was told then.
        pub async fn closed(&self) -> String {
            let closed = tokio::time::timeout(super::super::suite::LIMIT, self.connection.closed()).await;
            closed.expect("the connection is closed").to_string()
        }

        /// Greets as a node does, and is a link when this returns. Its own name must be the greater one: it chooses.
        pub async fn greet(&self, quic: &Quic, own: &str) -> (SendStream, RecvStream) {
            let (mut send, mut receive) = self.connection.open_bi().await.unwrap();
            send.write_all(&framed(&quic.hello(own).encode())).await.unwrap();
            let mut cutter = FrameCutter::new(HELLO_BYTES_MAX);
            let answer = loop {
                if let Some(frame) = cutter.cut().unwrap() {
                    break Control::decode(frame).unwrap();
                }
                cutter.push(receive.read_chunk(usize::MAX, true).await.unwrap().unwrap().bytes);
            };
            assert!(matches!(answer, Control::Hello(_)), "{answer:?}");
            let mut choice = vec![starling_transport::wire::CONTROL_USE];
            choice.extend(1u64.to_le_bytes());
            send.write_all(&framed(&choice)).await.unwrap();
            (send, receive)
        }

        /// A stream that begins with these bytes.
        pub async fn stream(&self, bytes: &[u8]) -> SendStream {
            let mut stream = self.connection.open_uni().await.unwrap();
            stream.write_chunk(Bytes::copy_from_slice(bytes)).await.unwrap();
            stream
        }
    }
}
