//! A collector in this process: what it received over OTLP, as it came.

// Each test binary uses what it needs.
#![allow(dead_code)]

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
pub struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub async fn start() -> (Self, SocketAddr) {
        let collector = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(collector.clone());
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener)));
        (collector, address)
    }

    pub fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().unwrap();
        let scopes = requests.iter().flat_map(|r| &r.resource_spans).flat_map(|r| &r.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// Each span, with the name of the node that it came from.
    pub fn spans_by_node(&self) -> Vec<(String, Span)> {
        let requests = self.0.lock().unwrap();
        let of_node = |resource: &ResourceSpans| {
            let attributes = &resource.resource.as_ref().expect("spans have a resource").attributes;
            let node = text(attributes, "service.instance.id").expect("a node names itself");
            let spans = resource.scope_spans.iter().flat_map(|scope| scope.spans.clone());
            spans.map(|span| (node.clone(), span)).collect::<Vec<_>>()
        };
        requests.iter().flat_map(|request| &request.resource_spans).flat_map(of_node).collect()
    }

    pub fn resource(&self) -> Vec<KeyValue> {
        self.0.lock().unwrap()[0].resource_spans[0].resource.clone().unwrap().attributes
    }
}

/// The value of an attribute, as text.
pub fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(n) => Some(n.to_string()),
        other => panic!("{key} is {other:?}"),
    }
}
