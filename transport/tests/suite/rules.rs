//! The rules. Each takes a fabric, and a test program names those that its fabric has to keep.

use super::{Allowed, Fabric, FabricNode, Pair, Record, pair};
use bytes::Bytes;
use starling_transport::Lane;
use std::sync::Arc;

const LANES: [Lane; 4] = [Lane::Control, Lane::Rounds, Lane::Messages(0), Lane::Messages(1)];

fn numbered(count: u32, size: usize) -> Vec<Bytes> {
    let frame = |number: u32| {
        let mut frame = vec![number as u8; size.max(4)];
        frame[..4].copy_from_slice(&number.to_le_bytes());
        Bytes::from(frame)
    };
    (0..count).map(frame).collect()
}

fn check(nodes: &[&Arc<Record>]) {
    for record in nodes {
        record.check();
    }
}

/// Frames of every size arrive on every lane in their order, both ways.
pub async fn frames_of_a_lane_keep_their_order<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, to_a } = pair(&fabric, &Allowed::default()).await;
    let mut frames = numbered(500, 10);
    frames.push(Bytes::new());
    frames.extend(numbered(20, 50_000));
    frames.extend(numbered(300, 1_400));
    for frame in &frames {
        for lane in LANES {
            to_b.send(lane, frame.clone()).unwrap();
            to_a.send(lane, frame.clone()).unwrap();
        }
    }
    for lane in LANES {
        assert!(b.record().frames(lane, frames.len()).await == frames, "{lane:?} to b");
        assert!(a.record().frames(lane, frames.len()).await == frames, "{lane:?} to a");
    }
    check(&[a.record(), b.record()]);
}
