//! The envelope: what stands before a body on a link. Fixed fields in little endian, by hand; only bodies go through the codec.
//!
//! ```text
//! hello        kind, u16 version, u16 codec, u32 window bytes
//! tell         kind, flags, u64 type, u64 request, u16 replies, [u32 ms left], [u128 trace, u64 span, u8 flags], u8 length, name, body
//! answer, item kind, u64 request, u16 index, body
//! fail         kind, u64 request, u16 index, u8 code, u64 items, u32 limit, text
//! cancel       kind, u64 request, u16 index
//! credit       kind, u64 flow, u32 bytes
//! item credit  kind, u64 request, u16 index, u32 items
//! ```

use crate::trace::TraceContext;
use bytes::Bytes;
use std::cell::Cell;
use std::convert::Infallible;

/// A change of the layout below is a new number.
pub(crate) const ENVELOPE_VERSION: u16 = 1;
/// An actor's name has its length in one byte.
pub(crate) const NAME_BYTES_MAX: usize = 255;
/// Replies and sinks in one message: a place for each is kept while the message is decoded.
pub(crate) const REPLIES_MAX: u16 = 256;
/// The reason of a failure, for a person.
const TEXT_BYTES_MAX: usize = 512;
/// Stands for all replies of a request.
pub(crate) const ALL_REPLIES: u16 = u16::MAX;

const FLAG_TRACE: u8 = 1;
const FLAG_DEADLINE: u8 = 2;

/// One reply or sink of one message: the number that the sender gave the message, and which of those inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub request: u64,
    pub index: u16,
}

/// A message for an actor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tell<'a> {
    pub name: &'a str,
    pub type_hash: u64,
    /// Names the replies inside; 0 where there is none.
    pub request: u64,
    pub replies: u16,
    /// Time left, so that no clocks are compared.
    pub left_ms: Option<u32>,
    pub trace: TraceContext,
    pub body: &'a [u8],
}

/// Why a question has no answer, or a stream no more items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The reply was dropped.
    Dropped,
    /// Its actor panicked on it, or died before it came to it.
    Died,
    ConnectionLost,
    NotRunning,
    MailboxFull {
        limit: u32,
    },
    NotExposed,
    UnknownType,
    Undecodable,
    DeadlineExceeded,
    /// There was an answer, which could not be brought home.
    AnswerLost {
        reason: String,
    },
    /// A stream that is complete.
    Finished,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Frame<'a> {
    Hello {
        version: u16,
        codec: u16,
        window_bytes: u32,
    },
    Tell(Tell<'a>),
    Answer {
        key: Key,
        body: &'a [u8],
    },
    /// `items` were sent before it, by lanes that it may have overtaken.
    Fail {
        key: Key,
        items: u64,
        failure: Failure,
    },
    Cancel {
        key: Key,
    },
    Credit {
        flow: u64,
        bytes: u32,
    },
    Item {
        key: Key,
        body: &'a [u8],
    },
    ItemCredit {
        key: Key,
        items: u32,
    },
}

const HELLO: u8 = 1;
const TELL: u8 = 2;
const ANSWER: u8 = 3;
const FAIL: u8 = 4;
const CANCEL: u8 = 5;
const CREDIT: u8 = 6;
const ITEM: u8 = 7;
const ITEM_CREDIT: u8 = 8;

/// Not an envelope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("empty frame")]
    Empty,
    #[error("unknown kind {kind} of {bytes} bytes")]
    UnknownKind { kind: u8, bytes: usize },
    #[error("frame of {bytes} bytes and kind {kind} ends within its {field}")]
    Short { kind: u8, bytes: usize, field: &'static str },
    #[error("{left} bytes follow a complete frame of kind {kind}")]
    Trailing { kind: u8, left: usize },
    #[error("{field} of a frame of kind {kind} is {value}")]
    Invalid { kind: u8, field: &'static str, value: u64 },
    #[error("{field} of a frame of kind {kind} is not text")]
    NotText { kind: u8, field: &'static str },
}

/// Frames up to this size are built in the thread's buffer and copied out of it once, at their exact size.
const SCRATCH_BYTES_MAX: usize = 64 << 10;

thread_local! {
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// What `write` puts into an empty buffer.
pub(crate) fn framed<E>(write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Bytes, E> {
    let mut out = SCRATCH.take();
    out.clear();
    let written = write(&mut out);
    let frame = written.map(|()| match out.len() {
        0..=SCRATCH_BYTES_MAX => Bytes::copy_from_slice(&out),
        _ => Bytes::from(std::mem::take(&mut out)),
    });
    SCRATCH.set(out);
    frame
}

impl Frame<'_> {
    pub fn encode(&self) -> Bytes {
        let Ok(frame) = framed(|out| {
            self.encode_onto(out);
            Ok::<_, Infallible>(())
        });
        frame
    }

    fn encode_onto(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello { version, codec, window_bytes } => {
                out.push(HELLO);
                out.extend(version.to_le_bytes());
                out.extend(codec.to_le_bytes());
                out.extend(window_bytes.to_le_bytes());
            }
            Self::Tell(tell) => {
                tell.encode_head(out);
                out.extend_from_slice(tell.body);
            }
            Self::Answer { key, body } => {
                key.encode(ANSWER, out);
                out.extend_from_slice(body);
            }
            Self::Fail { key, items, failure } => {
                key.encode(FAIL, out);
                let (code, limit, text) = failure.parts();
                out.push(code);
                out.extend(items.to_le_bytes());
                out.extend(limit.to_le_bytes());
                out.extend_from_slice(text.as_bytes());
            }
            Self::Cancel { key } => key.encode(CANCEL, out),
            Self::Credit { flow, bytes } => {
                out.push(CREDIT);
                out.extend(flow.to_le_bytes());
                out.extend(bytes.to_le_bytes());
            }
            Self::Item { key, body } => {
                key.encode(ITEM, out);
                out.extend_from_slice(body);
            }
            Self::ItemCredit { key, items } => {
                key.encode(ITEM_CREDIT, out);
                out.extend(items.to_le_bytes());
            }
        }
    }
}

/// What stands before the body of an answer or an item.
pub(crate) const KEY_BYTES: usize = 11;

impl Key {
    /// The answer to this question, its body written by `encode`.
    pub fn answer<E>(self, encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Bytes, E> {
        self.framed(ANSWER, encode)
    }

    /// An item of this stream, its body written by `encode`.
    pub fn item<E>(self, encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Bytes, E> {
        self.framed(ITEM, encode)
    }

    fn framed<E>(self, kind: u8, encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Bytes, E> {
        framed(|out| {
            self.encode(kind, out);
            encode(out)
        })
    }

    fn encode(self, kind: u8, out: &mut Vec<u8>) {
        out.push(kind);
        out.extend(self.request.to_le_bytes());
        out.extend(self.index.to_le_bytes());
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(Self { request: reader.u64("request")?, index: reader.u16("index")? })
    }
}

/// Where the request and the number of replies stand in a tell.
const TELL_REQUEST_AT: usize = 10;
const TELL_REPLIES_AT: usize = 18;

impl Tell<'_> {
    /// All but the body, into an empty buffer.
    pub fn encode_head(&self, out: &mut Vec<u8>) {
        let traced = self.trace != TraceContext::NONE;
        let flags = if traced { FLAG_TRACE } else { 0 } | if self.left_ms.is_some() { FLAG_DEADLINE } else { 0 };
        out.extend([TELL, flags]);
        out.extend(self.type_hash.to_le_bytes());
        out.extend(self.request.to_le_bytes());
        out.extend(self.replies.to_le_bytes());
        if let Some(left_ms) = self.left_ms {
            out.extend(left_ms.to_le_bytes());
        }
        if traced {
            out.extend(self.trace.trace_id.to_le_bytes());
            out.extend(self.trace.span_id.to_le_bytes());
            out.push(self.trace.flags);
        }
        let length = u8::try_from(self.name.len()).expect("an address's name has at most NAME_BYTES_MAX bytes");
        out.push(length);
        out.extend_from_slice(self.name.as_bytes());
    }

    /// Corrects a frame whose replies were found while its body was written.
    pub fn set_replies(frame: &mut [u8], request: u64, replies: u16) {
        frame[TELL_REQUEST_AT..TELL_REPLIES_AT].copy_from_slice(&request.to_le_bytes());
        frame[TELL_REPLIES_AT..TELL_REPLIES_AT + 2].copy_from_slice(&replies.to_le_bytes());
    }
}

impl<'a> Tell<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, WireError> {
        let flags = reader.u8("flags")?;
        if flags & !(FLAG_TRACE | FLAG_DEADLINE) != 0 {
            return Err(reader.invalid("flags", flags.into()));
        }
        let type_hash = reader.u64("type")?;
        let request = reader.u64("request")?;
        let replies = reader.u16("replies")?;
        if replies > REPLIES_MAX {
            return Err(reader.invalid("number of replies", replies.into()));
        }
        if (replies == 0) != (request == 0) {
            return Err(reader.invalid("request", request));
        }
        let left_ms = if flags & FLAG_DEADLINE != 0 { Some(reader.u32("deadline")?) } else { None };
        let mut trace = TraceContext::NONE;
        if flags & FLAG_TRACE != 0 {
            trace.trace_id = u128::from_le_bytes(reader.array("trace")?);
            trace.span_id = reader.u64("trace")?;
            trace.flags = reader.u8("trace")?;
        }
        let length = reader.u8("length of the name")?;
        let name = reader.take(length.into(), "name")?;
        let name = std::str::from_utf8(name).map_err(|_| WireError::NotText { kind: TELL, field: "name" })?;
        Ok(Self { name, type_hash, request, replies, left_ms, trace, body: reader.rest() })
    }
}

impl Failure {
    fn parts(&self) -> (u8, u32, &str) {
        match self {
            Self::Dropped => (1, 0, ""),
            Self::Died => (2, 0, ""),
            Self::ConnectionLost => (3, 0, ""),
            Self::NotRunning => (4, 0, ""),
            Self::MailboxFull { limit } => (5, *limit, ""),
            Self::NotExposed => (6, 0, ""),
            Self::UnknownType => (7, 0, ""),
            Self::Undecodable => (8, 0, ""),
            Self::DeadlineExceeded => (9, 0, ""),
            Self::AnswerLost { reason } => (10, 0, capped(reason)),
            Self::Finished => (11, 0, ""),
        }
    }

    fn from_parts(code: u8, limit: u32, text: &str) -> Option<Self> {
        Some(match code {
            1 => Self::Dropped,
            2 => Self::Died,
            3 => Self::ConnectionLost,
            4 => Self::NotRunning,
            5 => Self::MailboxFull { limit },
            6 => Self::NotExposed,
            7 => Self::UnknownType,
            8 => Self::Undecodable,
            9 => Self::DeadlineExceeded,
            10 => Self::AnswerLost { reason: text.to_owned() },
            11 => Self::Finished,
            _ => return None,
        })
    }
}

/// At most `TEXT_BYTES_MAX` bytes of a text, without half a character.
fn capped(text: &str) -> &str {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl<'a> Frame<'a> {
    /// # Errors
    /// What is wrong with the frame; never a panic, and nothing is reserved.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (&kind, rest) = bytes.split_first().ok_or(WireError::Empty)?;
        let mut reader = Reader { kind, bytes: bytes.len(), rest };
        let frame = match kind {
            HELLO => Self::Hello {
                version: reader.u16("version")?,
                codec: reader.u16("codec")?,
                window_bytes: reader.u32("window")?,
            },
            TELL => Self::Tell(Tell::decode(&mut reader)?),
            ANSWER => Self::Answer { key: Key::decode(&mut reader)?, body: reader.rest() },
            FAIL => Self::decode_fail(&mut reader)?,
            CANCEL => Self::Cancel { key: Key::decode(&mut reader)? },
            CREDIT => Self::Credit { flow: reader.u64("flow")?, bytes: reader.u32("bytes")? },
            ITEM => Self::Item { key: Key::decode(&mut reader)?, body: reader.rest() },
            ITEM_CREDIT => Self::ItemCredit { key: Key::decode(&mut reader)?, items: reader.u32("items")? },
            kind => return Err(WireError::UnknownKind { kind, bytes: bytes.len() }),
        };
        match reader.rest.len() {
            0 => Ok(frame),
            left => Err(WireError::Trailing { kind, left }),
        }
    }

    fn decode_fail(reader: &mut Reader<'a>) -> Result<Self, WireError> {
        let key = Key::decode(reader)?;
        let code = reader.u8("code")?;
        let items = reader.u64("items")?;
        let limit = reader.u32("limit")?;
        let text = reader.rest();
        if text.len() > TEXT_BYTES_MAX {
            return Err(reader.invalid("length of the text", text.len() as u64));
        }
        let text = std::str::from_utf8(text).map_err(|_| WireError::NotText { kind: FAIL, field: "reason" })?;
        let failure = Failure::from_parts(code, limit, text).ok_or_else(|| reader.invalid("code", code.into()))?;
        if failure.parts() != (code, limit, text) {
            return Err(reader.invalid("limit or text", limit.into()));
        }
        Ok(Self::Fail { key, items, failure })
    }
}

/// Takes fields off the front, each checked.
struct Reader<'a> {
    kind: u8,
    bytes: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], WireError> {
        let (kind, bytes) = (self.kind, self.bytes);
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(WireError::Short { kind, bytes, field })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        let (kind, bytes) = (self.kind, self.bytes);
        let (taken, rest) = self.rest.split_first_chunk().ok_or(WireError::Short { kind, bytes, field })?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        self.array(field).map(u8::from_le_bytes)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        self.array(field).map(u16::from_le_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    fn invalid(&self, field: &'static str, value: u64) -> WireError {
        WireError::Invalid { kind: self.kind, field, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key { request: 7, index: 3 };

    fn tell<'a>(left_ms: Option<u32>, trace: TraceContext) -> Tell<'a> {
        Tell { name: "rank-0/kv", type_hash: 11, request: 5, replies: 2, left_ms, trace, body: b"body" }
    }

    fn samples() -> Vec<Frame<'static>> {
        let trace = TraceContext { trace_id: 1 << 100, span_id: 9, flags: 1 };
        let reason = "é".repeat(200);
        let failures = [
            Failure::Dropped,
            Failure::Died,
            Failure::ConnectionLost,
            Failure::NotRunning,
            Failure::MailboxFull { limit: 4 },
            Failure::NotExposed,
            Failure::UnknownType,
            Failure::Undecodable,
            Failure::DeadlineExceeded,
            Failure::AnswerLost { reason },
            Failure::Finished,
        ];
        let mut frames = vec![
            Frame::Hello { version: 1, codec: 1, window_bytes: 1 << 20 },
            Frame::Tell(tell(None, TraceContext::NONE)),
            Frame::Tell(tell(Some(250), TraceContext::NONE)),
            Frame::Tell(tell(Some(0), trace)),
            Frame::Tell(Tell { request: 0, replies: 0, body: b"", ..tell(None, trace) }),
            Frame::Answer { key: KEY, body: b"answer" },
            Frame::Cancel { key: KEY },
            Frame::Credit { flow: u64::MAX, bytes: 17 },
            Frame::Item { key: KEY, body: b"" },
            Frame::ItemCredit { key: KEY, items: 8 },
        ];
        frames.extend(failures.map(|failure| Frame::Fail { key: KEY, items: 12, failure }));
        frames
    }

    #[test]
    fn frames_survive_a_round_trip() {
        for frame in samples() {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn whatever_is_cut_off_or_changed_never_panics_and_fixed_frames_are_refused() {
        for frame in samples() {
            let bytes = frame.encode();
            for end in 0..bytes.len() {
                // The body is the rest, whatever it is: then a shorter frame is another frame.
                if let Ok(shorter) = Frame::decode(&bytes[..end]) {
                    assert_ne!(shorter, frame);
                }
            }
            for bit in 0..bytes.len() * 8 {
                let mut changed = bytes.to_vec();
                changed[bit / 8] ^= 1 << (bit % 8);
                if let Ok(other) = Frame::decode(&changed) {
                    assert_ne!(other, frame);
                }
            }
        }
        let mut long = Frame::Cancel { key: KEY }.encode().to_vec();
        long.push(0);
        assert_eq!(Frame::decode(&long), Err(WireError::Trailing { kind: CANCEL, left: 1 }));
        assert_eq!(Frame::decode(&[]), Err(WireError::Empty));
        assert_eq!(Frame::decode(&[99, 1]), Err(WireError::UnknownKind { kind: 99, bytes: 2 }));
        let short = WireError::Short { kind: CANCEL, bytes: 3, field: "request" };
        assert_eq!(Frame::decode(&[CANCEL, 0, 0]), Err(short));
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let failure = Failure::AnswerLost { reason: "é".repeat(1_000) };
        let bytes = Frame::Fail { key: KEY, items: 0, failure }.encode();
        let Ok(Frame::Fail { failure: Failure::AnswerLost { reason }, .. }) = Frame::decode(&bytes) else {
            panic!("not a failure");
        };
        assert_eq!(reason, "é".repeat(TEXT_BYTES_MAX / 2));
    }
}
