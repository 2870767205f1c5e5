//! W3C trace context, <https://www.w3.org/TR/trace-context/>.

use std::fmt;
use std::str::FromStr;

const FLAG_SAMPLED: u8 = 1;
/// `00-` + 32 + `-` + 16 + `-` + 2.
const TRACEPARENT_LEN: usize = 55;

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

impl TraceContext {
    /// No trace: what a message without a cause carries.
    pub const NONE: Self = Self { trace_id: 0, span_id: 0, flags: 0 };

    /// Whether spans under this context are worth recording.
    pub fn is_sampled(&self) -> bool {
        self.trace_id != 0 && self.flags & FLAG_SAMPLED != 0
    }

    /// The context of what the span `span_id` causes, in the same trace.
    pub fn child(&self, span_id: u64) -> Self {
        Self { span_id, ..*self }
    }

    /// Reads the header `traceparent`.
    ///
    /// # Errors
    /// When the text is not a valid header of version 00, nor one of a later version that starts like it.
    pub fn parse_traceparent(header: &str) -> Result<Self, TraceparentError> {
        Self::parse_fields(header.trim().as_bytes()).ok_or_else(|| TraceparentError(header.chars().take(80).collect()))
    }

    /// The header `traceparent`; none when there is no trace to continue.
    pub fn to_traceparent(&self) -> Option<String> {
        (self.trace_id != 0 && self.span_id != 0)
            .then(|| format!("00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags))
    }

    fn parse_fields(header: &[u8]) -> Option<Self> {
        let (known, rest) = header.split_at_checked(TRACEPARENT_LEN)?;
        let version = hex(&known[0..2])?;
        let dashes = known[2] == b'-' && known[35] == b'-' && known[52] == b'-';
        // Version 00 ends here; a later one may go on after another dash; ff is forbidden.
        let rest_allowed = rest.is_empty() || (version > 0 && rest[0] == b'-');
        if version == 0xff || !dashes || !rest_allowed {
            return None;
        }
        let context = Self {
            trace_id: hex(&known[3..35])?,
            span_id: u64::try_from(hex(&known[36..52])?).ok()?,
            flags: u8::try_from(hex(&known[53..55])?).ok()?,
        };
        (context.trace_id != 0 && context.span_id != 0).then_some(context)
    }
}

/// Lower-case hexadecimal only, as the standard demands.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0u128, |value, digit| {
        let nibble = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(nibble))
    })
}

impl FromStr for TraceContext {
    type Err = TraceparentError;

    fn from_str(header: &str) -> Result<Self, Self::Err> {
        Self::parse_traceparent(header)
    }
}

/// The text was not a `traceparent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceparentError(String);

impl fmt::Display for TraceparentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a traceparent header: {:?}", self.0)
    }
}

impl std::error::Error for TraceparentError {}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn traceparent_survives_a_round_trip() {
        let context = TraceContext::parse_traceparent(HEADER).unwrap();
        assert_eq!(context.trace_id, 0x4bf92f3577b34da6a3ce929d0e0e4736);
        assert_eq!(context.span_id, 0x00f067aa0ba902b7);
        assert!(context.is_sampled());
        assert_eq!(context.to_traceparent().as_deref(), Some(HEADER));
        let child = context.child(7);
        assert_eq!((child.trace_id, child.span_id), (context.trace_id, 7));
        assert!(child.is_sampled());
    }

    #[test]
    fn later_versions_may_carry_more_fields_and_version_zero_may_not() {
        let later = HEADER.replacen("00", "cc", 1) + "-what-comes-later";
        assert_eq!(later.parse::<TraceContext>(), TraceContext::parse_traceparent(HEADER));
        assert!((HEADER.to_string() + "-more").parse::<TraceContext>().is_err());
        let glued = HEADER.replacen("00", "cc", 1) + "x";
        assert!(glued.parse::<TraceContext>().is_err());
    }

    #[test]
    fn malformed_headers_are_refused_without_a_panic() {
        let zero_trace = HEADER.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32));
        let zero_span = HEADER.replace("00f067aa0ba902b7", &"0".repeat(16));
        let refused = [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473é-0f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
            zero_trace.as_str(),
            zero_span.as_str(),
        ];
        for header in refused {
            assert!(header.parse::<TraceContext>().is_err(), "{header}");
        }
    }

    #[test]
    fn no_trace_is_never_sampled_and_has_no_header() {
        let flagged = TraceContext { flags: 1, ..TraceContext::NONE };
        assert!(!flagged.is_sampled());
        assert_eq!(flagged.to_traceparent(), None);
    }
}
