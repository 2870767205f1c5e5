//! The alphabet of byte-level byte-pair encoding: each byte is written as one printable character.
//!
//! # Source
//! GPT-2's encoder: printable Latin-1 stands for itself, the other 68 bytes get U+0100 and on, in order.

use std::collections::HashMap;

/// Both directions of the alphabet.
pub struct ByteAlphabet {
    chars: [char; 256],
    bytes: HashMap<char, u8>,
}

impl ByteAlphabet {
    pub fn new() -> Self {
        let mut chars = ['\0'; 256];
        let mut replacement = 0x100;
        for byte in 0..=255u8 {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            chars[byte as usize] = if printable {
                char::from(byte)
            } else {
                replacement += 1;
                char::from_u32(replacement - 1).unwrap_or('\0')
            };
        }
        let bytes = chars.iter().copied().zip(0..=255u8).collect();
        Self { chars, bytes }
    }

    /// The character that stands for a byte.
    #[cfg(test)]
    pub fn letter(&self, byte: u8) -> char {
        self.chars[byte as usize]
    }

    /// Writes each byte of `text` as its character.
    pub fn spell(&self, text: &str) -> String {
        text.bytes().map(|byte| self.chars[byte as usize]).collect()
    }

    /// The bytes that a spelling stands for; characters outside the alphabet stand for their own UTF-8 bytes.
    pub fn unspell(&self, spelling: &str) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(spelling.len());
        for char in spelling.chars() {
            match self.bytes.get(&char) {
                Some(&byte) => bytes.push(byte),
                None => bytes.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let alphabet = ByteAlphabet::new();
        assert_eq!(alphabet.bytes.len(), 256);
        assert_eq!(alphabet.spell(" \n"), "ĠĊ");
        assert_eq!(alphabet.unspell(&alphabet.spell("a é 😀")), "a é 😀".as_bytes());
    }
}
