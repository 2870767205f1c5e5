//! The actor framework.

/// W3C trace context, carried by every message: who caused it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TraceContext {
    /// 0 when there is no trace.
    pub trace_id: u128,
    /// The span that caused the message.
    pub span_id: u64,
    /// Bit 0: sampled.
    pub flags: u8,
}
