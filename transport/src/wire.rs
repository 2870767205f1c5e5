//! The bytes of the mesh: how frames are cut, what the control stream says, the hello. Pure, and total over any input.
//!
//! ```text
//! frame          u32 length, body                             (little endian, as all numbers here)
//! control        frames whose body is a kind byte and the rest
//! other streams  one kind byte, then frames (rounds, messages) or one body up to the end (bulk)
//! datagram       one kind byte, then the rest
//! ```

use crate::link::{LABEL_BYTES_MAX, NodeName, is_label};
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Of the application layer, in TLS: who does not speak it is refused before anything else is said.
pub const PROTOCOL: &[u8] = b"starling/1";
/// Said in the hello. A change of the hello's layout after this number is a change of [`PROTOCOL`].
pub const PROTOCOL_VERSION: u16 = 1;

pub const HEADER_BYTES: usize = 4;
/// The longest hello is shorter: 160 bytes.
pub const HELLO_BYTES_MAX: usize = 256;
pub const LANES_MAX: u8 = 4;

/// First byte of a stream that carries rounds.
pub const STREAM_ROUNDS: u8 = 1;
/// First byte of a stream that carries one body.
pub const STREAM_BULK: u8 = 2;
/// First byte of a stream that carries messages: this and the lane's number.
pub const STREAM_MESSAGES: u8 = 16;

pub const DATAGRAM_HEARTBEAT: u8 = 0;
pub const DATAGRAM_USER: u8 = 1;

pub const CONTROL_HELLO: u8 = 1;
pub const CONTROL_USE: u8 = 2;
pub const CONTROL_FRAME: u8 = 3;
pub const CONTROL_GOODBYE: u8 = 4;
pub const CONTROL_COMPLETE: u8 = 5;

/// A frame that is being put together takes at most this much before its bytes are there, whatever length it claims.
const RESERVED_BYTES_MAX: usize = 64 * 1024;

/// What is wrong with bytes from a peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("frame of {bytes} bytes (limit {limit})")]
    FrameTooLarge { bytes: usize, limit: usize },
    #[error("control frame of kind {0:?} is not known")]
    ControlKind(Option<u8>),
    #[error("control frame of kind {kind} has {bytes} bytes")]
    ControlLength { kind: u8, bytes: usize },
    #[error("hello of {bytes} bytes ends early")]
    HelloShort { bytes: usize },
    #[error("hello has {left} bytes too many")]
    HelloLong { left: usize },
    #[error("hello names the {what} {value:?}")]
    HelloName { what: &'static str, value: String },
    #[error("protocol version is {theirs} there, {ours} here")]
    Version { theirs: u16, ours: u16 },
    #[error("hello offers {what} {value}")]
    Offer { what: &'static str, value: u32 },
}

/// Cuts frames out of a stream's chunks. A frame that lies within one chunk is a slice of it; one that does not is copied once.
#[derive(Debug)]
pub struct FrameCutter {
    frame_bytes_max: usize,
    chunk: Bytes,
    /// The start of a frame, header included, of which no byte is in `chunk`.
    partial: BytesMut,
}

impl FrameCutter {
    pub fn new(frame_bytes_max: usize) -> Self {
        Self { frame_bytes_max, chunk: Bytes::new(), partial: BytesMut::new() }
    }

    /// For the frames that are cut from now on.
    pub fn set_limit(&mut self, frame_bytes_max: usize) {
        self.frame_bytes_max = frame_bytes_max;
    }

    /// Takes the stream's next chunk, once [`Self::cut`] has nothing left of the one before.
    pub fn push(&mut self, chunk: Bytes) {
        if self.chunk.is_empty() {
            self.chunk = chunk;
        } else {
            let mut joined = BytesMut::with_capacity(self.chunk.len() + chunk.len());
            joined.extend_from_slice(&self.chunk);
            joined.extend_from_slice(&chunk);
            self.chunk = joined.freeze();
        }
    }

    /// Bytes held of a frame that is not whole.
    pub fn held_bytes(&self) -> usize {
        self.partial.len() + self.chunk.len()
    }

    /// Memory taken for a frame that is not whole.
    pub fn reserved_bytes(&self) -> usize {
        self.partial.capacity()
    }

    /// The next whole frame, without its header; `None` when more chunks are needed.
    ///
    /// # Errors
    /// A length beyond the limit, before anything is reserved for it. The stream cannot be read any further.
    pub fn cut(&mut self) -> Result<Option<Bytes>, WireError> {
        if !self.partial.is_empty() {
            return self.complete();
        }
        let Some(length) = self.length(&self.chunk)? else {
            self.keep();
            return Ok(None);
        };
        if self.chunk.len() < HEADER_BYTES + length {
            self.partial.reserve((HEADER_BYTES + length).min(RESERVED_BYTES_MAX));
            self.keep();
            return Ok(None);
        }
        self.chunk.advance(HEADER_BYTES);
        Ok(Some(self.chunk.split_to(length)))
    }

    fn length(&self, bytes: &[u8]) -> Result<Option<usize>, WireError> {
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_le_bytes(*header)).unwrap_or(usize::MAX);
        if length > self.frame_bytes_max {
            return Err(WireError::FrameTooLarge { bytes: length, limit: self.frame_bytes_max });
        }
        Ok(Some(length))
    }

    fn keep(&mut self) {
        self.partial.extend_from_slice(&self.chunk);
        self.chunk = Bytes::new();
    }

    fn complete(&mut self) -> Result<Option<Bytes>, WireError> {
        self.fill(HEADER_BYTES);
        let Some(length) = self.length(&self.partial)? else {
            return Ok(None);
        };
        let whole = HEADER_BYTES + length;
        if self.partial.capacity() == self.partial.len() {
            self.partial.reserve((whole - self.partial.len()).min(RESERVED_BYTES_MAX));
        }
        self.fill(whole);
        if self.partial.len() < whole {
            return Ok(None);
        }
        let mut frame = std::mem::take(&mut self.partial).freeze();
        frame.advance(HEADER_BYTES);
        Ok(Some(frame))
    }

    /// Moves bytes from the chunk until the partial frame has `bytes`, as far as they go.
    fn fill(&mut self, bytes: usize) {
        let missing = bytes.saturating_sub(self.partial.len()).min(self.chunk.len());
        self.partial.extend_from_slice(&self.chunk[..missing]);
        self.chunk.advance(missing);
    }
}

/// What the control stream says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    Hello(Bytes),
    /// From the node with the greater name: of the connections to the other one it uses this. The number grows with each choice.
    Use {
        serial: u64,
    },
    Frame(Bytes),
    /// Nothing comes after this: all lanes have ended, and so many bodies were sent in all.
    Goodbye {
        bodies: u64,
    },
    /// All that the other's goodbye spoke of has arrived.
    Complete,
}

impl Control {
    /// For people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Use { .. } => "choice",
            Self::Frame(_) => "frame",
            Self::Goodbye { .. } => "goodbye",
            Self::Complete => "completion",
        }
    }

    /// # Errors
    /// An unknown kind, or a wrong length for its kind.
    pub fn decode(mut frame: Bytes) -> Result<Self, WireError> {
        let kind = *frame.first().ok_or(WireError::ControlKind(None))?;
        frame.advance(1);
        let number = || -> Result<u64, WireError> {
            let bytes = <[u8; 8]>::try_from(&frame[..]);
            bytes.map(u64::from_le_bytes).map_err(|_| WireError::ControlLength { kind, bytes: frame.len() })
        };
        match kind {
            CONTROL_HELLO => Ok(Self::Hello(frame)),
            CONTROL_USE => Ok(Self::Use { serial: number()? }),
            CONTROL_FRAME => Ok(Self::Frame(frame)),
            CONTROL_GOODBYE => Ok(Self::Goodbye { bodies: number()? }),
            CONTROL_COMPLETE if frame.is_empty() => Ok(Self::Complete),
            CONTROL_COMPLETE => Err(WireError::ControlLength { kind, bytes: frame.len() }),
            other => Err(WireError::ControlKind(Some(other))),
        }
    }
}

/// What a node allows on a link; of both sides' offers the smaller holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Lanes of messages.
    pub lanes: u8,
    /// Bodies under way at a time, each way.
    pub bulk_streams_max: u8,
    pub frame_bytes_max: u32,
    pub bulk_bytes_max: u32,
}

impl Offer {
    #[must_use]
    pub fn agreed(self, other: Self) -> Self {
        Self {
            lanes: self.lanes.min(other.lanes),
            bulk_streams_max: self.bulk_streams_max.min(other.bulk_streams_max),
            frame_bytes_max: self.frame_bytes_max.min(other.frame_bytes_max),
            bulk_bytes_max: self.bulk_bytes_max.min(other.bulk_bytes_max),
        }
    }
}

/// What each side says first. Written by hand, since it must be understood by whoever has another codec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub codec: u16,
    pub incarnation: u64,
    pub settings_digest: u64,
    pub offer: Offer,
    pub name: NodeName,
    pub cluster: String,
}

impl Hello {
    /// The body of a control frame, kind byte included.
    pub fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(HELLO_BYTES_MAX);
        bytes.put_u8(CONTROL_HELLO);
        bytes.put_u16_le(PROTOCOL_VERSION);
        bytes.put_u16_le(self.codec);
        bytes.put_u64_le(self.incarnation);
        bytes.put_u64_le(self.settings_digest);
        bytes.put_u8(self.offer.lanes);
        bytes.put_u8(self.offer.bulk_streams_max);
        bytes.put_u32_le(self.offer.frame_bytes_max);
        bytes.put_u32_le(self.offer.bulk_bytes_max);
        for text in [self.name.as_str(), &self.cluster] {
            debug_assert!(text.len() <= LABEL_BYTES_MAX, "names of nodes and clusters are labels");
            bytes.put_u8(text.len() as u8);
            bytes.put_slice(text.as_bytes());
        }
        bytes.freeze()
    }

    /// What follows the kind byte.
    ///
    /// # Errors
    /// Another version, of which nothing else is read; anything that is not exactly a hello.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields { left: bytes, whole: bytes.len() };
        let theirs = u16::from_le_bytes(fields.take()?);
        if theirs != PROTOCOL_VERSION {
            return Err(WireError::Version { theirs, ours: PROTOCOL_VERSION });
        }
        let codec = u16::from_le_bytes(fields.take()?);
        let incarnation = u64::from_le_bytes(fields.take()?);
        let settings_digest = u64::from_le_bytes(fields.take()?);
        let [lanes, bulk_streams_max] = fields.take()?;
        let frame_bytes_max = u32::from_le_bytes(fields.take()?);
        let bulk_bytes_max = u32::from_le_bytes(fields.take()?);
        let name = fields.text("node")?;
        let name = NodeName::new(&name).map_err(|_| WireError::HelloName { what: "node", value: name })?;
        let cluster = fields.text("cluster")?;
        if !is_label(&cluster) {
            return Err(WireError::HelloName { what: "cluster", value: cluster });
        }
        if !fields.left.is_empty() {
            return Err(WireError::HelloLong { left: fields.left.len() });
        }
        if !(1..=LANES_MAX).contains(&lanes) {
            return Err(WireError::Offer { what: "lanes", value: u32::from(lanes) });
        }
        if bulk_streams_max == 0 {
            return Err(WireError::Offer { what: "bulk streams", value: 0 });
        }
        let offer = Offer { lanes, bulk_streams_max, frame_bytes_max, bulk_bytes_max };
        Ok(Self { codec, incarnation, settings_digest, offer, name, cluster })
    }
}

struct Fields<'a> {
    left: &'a [u8],
    whole: usize,
}

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (field, left) = self.left.split_first_chunk().ok_or(WireError::HelloShort { bytes: self.whole })?;
        self.left = left;
        Ok(*field)
    }

    fn text(&mut self, what: &'static str) -> Result<String, WireError> {
        let [length] = self.take()?;
        let (text, left) =
            self.left.split_at_checked(usize::from(length)).ok_or(WireError::HelloShort { bytes: self.whole })?;
        self.left = left;
        let shown = || WireError::HelloName { what, value: String::from_utf8_lossy(text).into_owned() };
        std::str::from_utf8(text).map(str::to_owned).map_err(|_| shown())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            codec: 1,
            incarnation: u64::MAX,
            settings_digest: 7,
            offer: Offer { lanes: 4, bulk_streams_max: 9, frame_bytes_max: 1 << 20, bulk_bytes_max: u32::MAX },
            name: NodeName::new(&"n".repeat(LABEL_BYTES_MAX)).unwrap(),
            cluster: "c".repeat(LABEL_BYTES_MAX),
        }
    }

    #[test]
    fn a_hello_survives_the_wire_and_fits_its_limit() {
        let bytes = hello().encode();
        assert!(bytes.len() <= HELLO_BYTES_MAX);
        let Control::Hello(body) = Control::decode(bytes).unwrap() else { panic!("not a hello") };
        assert_eq!(Hello::decode(&body), Ok(hello()));
    }

    #[test]
    fn every_truncation_and_extension_of_a_hello_is_refused() {
        let body = hello().encode().slice(1..);
        for end in 0..body.len() {
            assert_eq!(Hello::decode(&body[..end]), Err(WireError::HelloShort { bytes: end }));
        }
        let long = [&body[..], &[0]].concat();
        assert_eq!(Hello::decode(&long), Err(WireError::HelloLong { left: 1 }));
    }

    #[test]
    fn of_another_version_only_the_number_is_read() {
        let refused = Hello::decode(&[9, 0]).unwrap_err();
        assert_eq!(refused, WireError::Version { theirs: 9, ours: 1 });
        assert_eq!(refused.to_string(), "protocol version is 9 there, 1 here");
    }

    #[test]
    fn a_hello_offers_lanes_and_names_labels() {
        let mut none = hello();
        none.offer.lanes = 0;
        let refused = Hello::decode(&none.encode()[1..]);
        assert_eq!(refused, Err(WireError::Offer { what: "lanes", value: 0 }));
        let mut odd = hello();
        odd.cluster = "A/b".into();
        let refused = Hello::decode(&odd.encode()[1..]);
        assert_eq!(refused, Err(WireError::HelloName { what: "cluster", value: "A/b".into() }));
    }

    #[test]
    fn the_smaller_offer_holds() {
        let ours = Offer { lanes: 4, bulk_streams_max: 5, frame_bytes_max: 10, bulk_bytes_max: 300 };
        let theirs = Offer { lanes: 2, bulk_streams_max: 6, frame_bytes_max: 20, bulk_bytes_max: 200 };
        let smaller = Offer { lanes: 2, bulk_streams_max: 5, frame_bytes_max: 10, bulk_bytes_max: 200 };
        assert_eq!(ours.agreed(theirs), smaller);
        assert_eq!(ours.agreed(theirs), theirs.agreed(ours));
    }

    fn framed(frames: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for frame in frames {
            bytes.extend((frame.len() as u32).to_le_bytes());
            bytes.extend(frame);
        }
        bytes
    }

    proptest! {
        #[test]
        fn frames_are_the_same_however_the_stream_is_chunked(
            frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..70), 0..20),
            chunks in proptest::collection::vec(1usize..90, 1..40),
        ) {
            let bytes = framed(&frames);
            let (mut cutter, mut left, mut found) = (FrameCutter::new(70), &bytes[..], Vec::new());
            let mut sizes = chunks.iter().cycle();
            while !left.is_empty() {
                let (chunk, rest) = left.split_at(left.len().min(*sizes.next().unwrap()));
                left = rest;
                cutter.push(Bytes::copy_from_slice(chunk));
                while let Some(frame) = cutter.cut().unwrap() {
                    found.push(frame.to_vec());
                }
            }
            prop_assert_eq!(found, frames);
            prop_assert_eq!(cutter.held_bytes(), 0);
        }
    }

    #[test]
    fn a_frame_within_a_chunk_is_not_copied() {
        let chunk = Bytes::from(framed(&[vec![1; 8], vec![2; 8]]));
        let range = chunk.as_ptr_range();
        let mut cutter = FrameCutter::new(8);
        cutter.push(chunk.clone());
        for value in [1, 2] {
            let frame = cutter.cut().unwrap().unwrap();
            assert_eq!(&frame[..], &[value; 8]);
            assert!(range.contains(&frame.as_ptr()));
        }
        assert_eq!(cutter.cut(), Ok(None));
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_anything_is_reserved() {
        for split in 0..=4 {
            let header = 9u32.to_le_bytes();
            let mut cutter = FrameCutter::new(8);
            let mut refused = Ok(None);
            for part in [&header[..split], &header[split..]] {
                cutter.push(Bytes::copy_from_slice(part));
                refused = cutter.cut();
            }
            assert_eq!(refused, Err(WireError::FrameTooLarge { bytes: 9, limit: 8 }), "split at {split}");
        }
    }

    #[test]
    fn a_claimed_length_reserves_little_before_its_bytes_are_there() {
        let mut cutter = FrameCutter::new(1 << 30);
        cutter.push(Bytes::copy_from_slice(&(1u32 << 30).to_le_bytes()));
        assert_eq!(cutter.cut(), Ok(None));
        cutter.push(Bytes::from_static(&[1]));
        assert_eq!(cutter.cut(), Ok(None));
        assert!(cutter.reserved_bytes() <= 2 * RESERVED_BYTES_MAX, "{}", cutter.reserved_bytes());
    }

    #[test]
    fn control_frames_have_their_lengths() {
        let decode = |bytes: &[u8]| Control::decode(Bytes::copy_from_slice(bytes));
        assert_eq!(decode(&[]), Err(WireError::ControlKind(None)));
        assert_eq!(decode(&[0]), Err(WireError::ControlKind(Some(0))));
        assert_eq!(decode(&[CONTROL_USE, 1]), Err(WireError::ControlLength { kind: CONTROL_USE, bytes: 1 }));
        assert_eq!(decode(&[CONTROL_USE, 1, 0, 0, 0, 0, 0, 0, 0]), Ok(Control::Use { serial: 1 }));
        assert_eq!(decode(&[CONTROL_GOODBYE, 2, 0, 0, 0, 0, 0, 0, 0]), Ok(Control::Goodbye { bodies: 2 }));
        assert_eq!(decode(&[CONTROL_COMPLETE]), Ok(Control::Complete));
        assert_eq!(decode(&[CONTROL_COMPLETE, 0]), Err(WireError::ControlLength { kind: 5, bytes: 1 }));
        assert_eq!(decode(&[CONTROL_FRAME, 8]), Ok(Control::Frame(Bytes::from_static(&[8]))));
    }
}
