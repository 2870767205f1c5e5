//! The wire codec: serde values as bytes. The only file that names bincode, so that another codec can take its place.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Names this encoding in a handshake: bincode 2, little endian, variable-length integers. Peers with different numbers must not
/// exchange bodies.
pub const CODEC_NUMBER: u16 = 1;

/// Why a value could not be encoded, or bytes could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    #[error("value cannot be encoded: {reason}")]
    Encode { reason: String },
    #[error("{bytes} bytes are not a valid {target}: {reason}")]
    Malformed { bytes: usize, target: &'static str, reason: String },
    #[error("{target} asks for more than {limit} bytes")]
    TooLarge { target: &'static str, limit: usize },
    #[error("{left} bytes follow a complete {target}")]
    TrailingBytes { left: usize, target: &'static str },
}

/// Encodes `value`.
///
/// # Errors
/// [`CodecError::Encode`] when its `Serialize` fails, for instance on a sequence of unknown length.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    let mut out = Vec::new();
    encode_onto(value, &mut out)?;
    Ok(out)
}

/// Encodes `value` behind what `out` holds.
///
/// # Errors
/// As [`encode`]; `out` then ends in a part of the value.
pub fn encode_onto<T: Serialize>(value: &T, out: &mut Vec<u8>) -> Result<(), CodecError> {
    let encoded = bincode::serde::encode_into_writer(value, Onto(out), bincode::config::standard());
    encoded.map_err(|error| CodecError::Encode { reason: error.to_string() })
}

struct Onto<'a>(&'a mut Vec<u8>);

impl bincode::enc::write::Writer for Onto<'_> {
    // Called for each byte of an array.
    #[inline(always)]
    fn write(&mut self, bytes: &[u8]) -> Result<(), bincode::error::EncodeError> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// Decodes a value that takes up all of `bytes`, reading and reserving at most `LIMIT` bytes whatever lengths the input claims.
///
/// Two kinds of type must not be decoded from an untrusted peer, because no count of bytes bounds them: sequences of zero-sized
/// values, and types that contain themselves.
///
/// # Errors
/// [`CodecError::TooLarge`], [`CodecError::Malformed`] or [`CodecError::TrailingBytes`]; never a panic.
pub fn decode<T: DeserializeOwned, const LIMIT: usize>(bytes: &[u8]) -> Result<T, CodecError> {
    let target = std::any::type_name::<T>();
    let config = bincode::config::standard().with_limit::<LIMIT>();
    match bincode::serde::decode_from_slice(bytes, config) {
        Ok((value, read)) if read == bytes.len() => Ok(value),
        Ok((_, read)) => Err(CodecError::TrailingBytes { left: bytes.len() - read, target }),
        Err(bincode::error::DecodeError::LimitExceeded) => Err(CodecError::TooLarge { target, limit: LIMIT }),
        Err(error) => Err(CodecError::Malformed { bytes: bytes.len(), target, reason: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    const LIMIT: usize = 64 * 1024;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    enum Sample {
        Nothing,
        Numbers(Vec<u64>),
        Named { name: String, table: BTreeMap<u16, Option<i64>>, key: [u8; 16], flag: bool, letter: char },
    }

    fn samples() -> impl Strategy<Value = Sample> {
        let table = proptest::collection::btree_map(any::<u16>(), any::<Option<i64>>(), 0..8);
        let named = (".{0,24}", table, any::<[u8; 16]>(), any::<bool>(), any::<char>());
        prop_oneof![
            Just(Sample::Nothing),
            proptest::collection::vec(any::<u64>(), 0..32).prop_map(Sample::Numbers),
            named.prop_map(|(name, table, key, flag, letter)| Sample::Named { name, table, key, flag, letter }),
        ]
    }

    proptest! {
        #[test]
        fn values_survive_a_round_trip(sample in samples()) {
            let bytes = encode(&sample).unwrap();
            prop_assert_eq!(decode::<Sample, LIMIT>(&bytes), Ok(sample));
        }

        #[test]
        fn every_truncation_and_every_extension_is_refused(sample in samples(), extra in 1usize..9) {
            let bytes = encode(&sample).unwrap();
            for end in 0..bytes.len() {
                let refused = matches!(
                    decode::<Sample, LIMIT>(&bytes[..end]),
                    Err(CodecError::Malformed { .. })
                );
                prop_assert!(refused, "{} of {} bytes", end, bytes.len());
            }
            let mut long = bytes;
            long.extend(std::iter::repeat_n(0, extra));
            let refused = decode::<Sample, LIMIT>(&long);
            let trailing = matches!(refused, Err(CodecError::TrailingBytes { left, .. }) if left == extra);
            prop_assert!(trailing, "{:?}", refused);
        }

        #[test]
        fn random_bytes_never_panic_and_what_decodes_encodes_again(
            bytes in proptest::collection::vec(any::<u8>(), 0..256),
        ) {
            if let Ok(sample) = decode::<Sample, LIMIT>(&bytes) {
                let again = encode(&sample).unwrap();
                prop_assert_eq!(decode::<Sample, LIMIT>(&again), Ok(sample));
            }
        }

        #[test]
        fn one_flipped_bit_never_panics(sample in samples(), at in any::<usize>()) {
            let mut bytes = encode(&sample).unwrap();
            let bit = at % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Either outcome is right; reaching it is the test.
            let _ = decode::<Sample, LIMIT>(&bytes);
        }
    }

    /// A variable-length integer with its full 64 bits, as a hostile peer would claim a length.
    fn claimed_length(length: u64) -> Vec<u8> {
        let mut bytes = vec![253];
        bytes.extend(length.to_le_bytes());
        bytes
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_reserved() {
        for length in [1 << 20, 1 << 40, 1 << 60, u64::MAX] {
            let bytes = claimed_length(length);
            let text = decode::<String, LIMIT>(&bytes);
            assert!(matches!(text, Err(CodecError::TooLarge { limit: LIMIT, .. })), "{text:?}");
            assert!(decode::<Vec<u8>, LIMIT>(&bytes).is_err());
            assert!(decode::<Vec<u64>, LIMIT>(&bytes).is_err());
            assert!(decode::<BTreeMap<u64, String>, LIMIT>(&bytes).is_err());
        }
    }

    #[test]
    fn a_value_larger_than_the_limit_is_refused_though_all_its_bytes_are_there() {
        let bytes = encode(&"x".repeat(100)).unwrap();
        assert!(decode::<String, 128>(&bytes).is_ok());
        let refused = decode::<String, 64>(&bytes);
        assert!(matches!(refused, Err(CodecError::TooLarge { limit: 64, .. })), "{refused:?}");
    }

    #[test]
    fn errors_name_the_type_and_the_sizes() {
        let error = decode::<u8, LIMIT>(&[1, 2, 3]).unwrap_err();
        assert_eq!(error.to_string(), "2 bytes follow a complete u8");
    }

    /// Changing these bytes means a new `CODEC_NUMBER`.
    #[test]
    fn the_encoding_of_codec_one_is_fixed() {
        assert_eq!(CODEC_NUMBER, 1);
        let value = (7u64, 300u16, "ab", Some(-1i32), [1u8, 2]);
        let expected = [7, 251, 44, 1, 2, b'a', b'b', 1, 1, 1, 2];
        assert_eq!(encode(&value).unwrap(), expected);
    }
}
