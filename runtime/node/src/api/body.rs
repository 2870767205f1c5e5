//! Reads request bodies within limits of size and time.

use super::error::ApiError;
use axum::body::{Body, Bytes};
use futures_core::Stream;
use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::timeout;

/// A body that is too large is read on and thrown away up to this many bytes: clients that send everything before they
/// read would else never see the answer.
const DISCARDED_BYTES_MAX: usize = 64 << 20;

/// The whole body.
///
/// # Errors
/// When it is too large, too slow, or breaks off.
pub async fn read(body: Body, bytes_max: usize, seconds_max: u64) -> Result<Vec<u8>, ApiError> {
    let whole = collect(body, bytes_max);
    let in_time = timeout(Duration::from_secs(seconds_max), whole).await;
    in_time.map_err(|_| ApiError::BodyLate { seconds: seconds_max })?
}

async fn collect(body: Body, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut collected = Vec::new();
    let mut discarded = 0;
    while let Some(part) = poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await {
        let part: Bytes = part.map_err(|_| ApiError::BodyLost)?;
        if discarded == 0 && collected.len() + part.len() <= bytes_max {
            collected.extend_from_slice(&part);
        } else {
            discarded += part.len();
            collected = Vec::new();
        }
        if discarded > DISCARDED_BYTES_MAX {
            break;
        }
    }
    match discarded {
        0 => Ok(collected),
        _ => Err(ApiError::BodyTooLarge { limit: bytes_max }),
    }
}
