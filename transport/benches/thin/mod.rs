//! The yardstick of two benchmarks: the least that carries frames both ways over one QUIC stream with mutual TLS. A bounded queue, a
//! writer that batches, lengths before frames.

use bytes::{Buf, Bytes, BytesMut};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use starling_transport::{Authority, NodeCertificate, NodeName};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

pub type Failure = Box<dyn Error + Send + Sync>;

pub const THIN_QUEUE: usize = 1024;
const THIN_BATCH_BYTES_MAX: usize = 128 * 1024;

pub async fn thin_writer(mut frames: mpsc::Receiver<Bytes>, mut send: SendStream) -> Result<(), Failure> {
    let mut batch = Vec::with_capacity(2 * THIN_BATCH_BYTES_MAX);
    while let Some(first) = frames.recv().await {
        let mut next = Some(first);
        while let Some(frame) = next {
            batch.extend((frame.len() as u32).to_le_bytes());
            batch.extend_from_slice(&frame);
            next = if batch.len() < THIN_BATCH_BYTES_MAX { frames.try_recv().ok() } else { None };
        }
        send.write_all(&batch).await?;
        batch.clear();
    }
    Ok(())
}

pub struct ThinReader {
    receive: RecvStream,
    came: BytesMut,
}

impl ThinReader {
    pub fn new(receive: RecvStream) -> Self {
        Self { receive, came: BytesMut::new() }
    }

    /// The next frame; `None` when the stream has ended.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            if let Some(header) = self.came.first_chunk() {
                let length = u32::from_le_bytes(*header) as usize;
                if self.came.len() >= 4 + length {
                    self.came.advance(4);
                    return Ok(Some(self.came.split_to(length).freeze()));
                }
            }
            match self.receive.read_chunk(usize::MAX, true).await? {
                Some(chunk) => self.came.extend_from_slice(&chunk.bytes),
                None => return Ok(None),
            }
        }
    }
}

/// Two ends of a plain connection with mutual TLS, and the endpoints that keep it alive.
pub async fn connected(authority: &Authority) -> Result<(Connection, Connection, [Endpoint; 2]), Failure> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.certificate_pem().as_bytes())?)?;
    let (roots, provider) = (Arc::new(roots), Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
    let own = |name: &str| -> Result<_, Failure> {
        let NodeCertificate { certificate_pem, key_pem } = authority.issue(&NodeName::new(name)?, 1)?;
        let chain = vec![CertificateDer::from_pem_slice(certificate_pem.as_bytes())?];
        Ok((chain, PrivateKeyDer::from_pem_slice(key_pem.as_bytes())?))
    };
    let versions = [&rustls::version::TLS13];
    let verifier =
        rustls::server::WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
    let (chain, key) = own("server")?;
    let server = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&versions)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    let (chain, key) = own("client")?;
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    let server = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?));
    let mut client = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?));
    let mut transport = quinn::TransportConfig::default();
    // It has to outlive the others' turns.
    transport.keep_alive_interval(Some(Duration::from_secs(1)));
    client.transport_config(Arc::new(transport));
    let listens = Endpoint::server(server, "127.0.0.1:0".parse()?)?;
    let dials = Endpoint::client("127.0.0.1:0".parse()?)?;
    let connecting = dials.connect_with(client, listens.local_addr()?, "server")?;
    let accepted = listens.accept();
    let accepted = async { Ok::<_, Failure>(accepted.await.ok_or("closed")?.await?) };
    let (client, server) = tokio::join!(connecting, accepted);
    Ok((client?, server?, [dials, listens]))
}
