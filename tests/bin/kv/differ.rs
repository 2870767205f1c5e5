//! The first difference between what is expected and what was found.

use serde_json::Value;

/// Relative difference of two numbers that are the same.
const SAME: f64 = 1e-9;

/// What an expected null says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Nulls {
    /// Nothing is pinned there.
    Open,
    /// A null.
    Pinned,
}

/// Every field of `expected` is found and equal; `found` may say more.
///
/// # Errors
/// The first field that differs, what it should be and what it is.
pub fn agree(field: &str, expected: &Value, found: &Value, nulls: Nulls) -> Result<(), String> {
    match (expected, found) {
        (Value::Null, _) if nulls == Nulls::Open => Ok(()),
        (Value::Object(expected), Value::Object(found)) => expected.iter().try_for_each(|(name, value)| {
            agree(&join(field, name), value, found.get(name).unwrap_or(&Value::Null), nulls)
        }),
        (Value::Array(expected), Value::Array(found)) if expected.len() == found.len() => {
            let pairs = expected.iter().zip(found).enumerate();
            pairs
                .into_iter()
                .try_for_each(|(at, (expected, found))| agree(&format!("{field}[{at}]"), expected, found, nulls))
        }
        (Value::Number(a), Value::Number(b)) if is_same(a.as_f64(), b.as_f64()) => Ok(()),
        _ if expected == found => Ok(()),
        _ => Err(format!("{field}: expected {expected}, found {found}")),
    }
}

fn join(field: &str, name: &str) -> String {
    if field.is_empty() { name.to_string() } else { format!("{field}.{name}") }
}

fn is_same(a: Option<f64>, b: Option<f64>) -> bool {
    let (Some(a), Some(b)) = (a, b) else { return false };
    a == b || (a - b).abs() <= SAME * a.abs().max(b.abs())
}
