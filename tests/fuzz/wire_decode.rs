//! Fuzz targets of the mesh's wire: plain functions over bytes that a peer could send.

use bytes::Bytes;
use starling_transport::Credentials;
use starling_transport::wire::{Control, FrameCutter, HEADER_BYTES, HELLO_BYTES_MAX, Hello};

/// A control frame, with the hello in it: what decodes says the same when it is said again.
pub fn control(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    for body in [bytes.clone(), Bytes::from([&[1, 1, 0][..], &bytes].concat())] {
        let Ok(decoded) = Control::decode(body.clone()) else { continue };
        match decoded {
            Control::Hello(hello) => {
                if let Ok(hello) = Hello::decode(&hello) {
                    let again = hello.encode();
                    assert!(again.len() <= HELLO_BYTES_MAX, "a hello of {} bytes", again.len());
                    assert_eq!(again, body, "a hello is said in two ways");
                }
            }
            Control::Frame(frame) => assert_eq!(frame, body[1..]),
            Control::Use { .. } | Control::Goodbye { .. } => assert_eq!(body.len(), 9),
            Control::Complete => assert_eq!(body.len(), 1),
        }
    }
}

/// A stream in chunks of any sizes: the frames and what is left are what came, nothing passes the limit, and what is held and
/// reserved for it depends on what came, not on what was claimed.
pub fn frames(bytes: &[u8]) {
    let [shape, chunked, stream @ ..] = bytes else { return };
    let limit = [0, 3, 200, 1 << 20, 1 << 31][usize::from(shape % 5)];
    // Random lengths are mostly absurd, so half of the inputs have small ones.
    let small_lengths = shape & 128 != 0;
    let stream: Vec<u8> = match small_lengths {
        true => stream.chunks(9).flat_map(|part| [&[part.len() as u8, 0, 0, 0][..], part].concat()).collect(),
        false => stream.to_vec(),
    };
    let mut cutter = FrameCutter::new(limit);
    let (mut rebuilt, mut came) = (Vec::new(), 0);
    for chunk in stream.chunks(1 + usize::from(chunked % 40)) {
        came += chunk.len();
        cutter.push(Bytes::copy_from_slice(chunk));
        loop {
            match cutter.cut() {
                Ok(Some(frame)) => {
                    assert!(frame.len() <= limit);
                    rebuilt.extend((frame.len() as u32).to_le_bytes());
                    rebuilt.extend(&frame[..]);
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
        assert_eq!(rebuilt.len() + cutter.held_bytes(), came, "bytes were lost or made up");
        assert!(cutter.reserved_bytes() <= 4 * came + 128 * 1024 + HEADER_BYTES, "{} bytes", cutter.reserved_bytes());
    }
    assert_eq!(rebuilt[..], stream[..rebuilt.len()], "frames differ from what came");
}

/// Text that an operator or an attacker could put into a credential file.
pub fn certificate(bytes: &[u8]) {
    let pem = [b"-----BEGIN CERTIFICATE-----\n", bytes, b"\n-----END CERTIFICATE-----\n"].concat();
    for text in [bytes, &pem] {
        assert!(Credentials::from_pem(text, text, text).is_err());
    }
}
