//! What the framework reports to whoever measures: the node's binary installs metrics and spans here.

use crate::TraceContext;
use std::time::SystemTime;

/// Called from the actors themselves, so an implementation must be cheap and must not block. Every method may be left out.
pub trait Hook: Send + Sync + 'static {
    /// One message of `actor` took `seconds` to handle. Sampled: the first message of an actor and then one in 64.
    fn handled(&self, _actor: &str, _kind: &'static str, _seconds: f64) {}

    /// A finished span; only called under a sampled trace.
    fn span(&self, _span: SpanRecord) {}

    /// `actor` runs again after a failure of its group.
    fn restarted(&self, _actor: &str) {}

    /// `actor` panicked or returned an error, or is a supervisor that gave up.
    fn failed(&self, _actor: &str) {}
}

/// Reports nothing.
pub struct NoHook;

impl Hook for NoHook {}

/// A finished span of an actor's work.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanRecord {
    pub parent: TraceContext,
    /// Set when other spans already name this one as their parent; otherwise whoever writes the span draws an id.
    pub span_id: Option<u64>,
    pub name: &'static str,
    pub start: SystemTime,
    pub end: SystemTime,
    pub attributes: Vec<(&'static str, AttributeValue)>,
}

/// The value of a span's attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum AttributeValue {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

impl From<bool> for AttributeValue {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for AttributeValue {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<u32> for AttributeValue {
    fn from(value: u32) -> Self {
        Self::Int(i64::from(value))
    }
}

impl From<u64> for AttributeValue {
    /// Traces have no unsigned 64-bit values: what does not fit is capped.
    fn from(value: u64) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<usize> for AttributeValue {
    fn from(value: usize) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<f64> for AttributeValue {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<&str> for AttributeValue {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for AttributeValue {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}
