//! Reads the fields of a JSON body one by one, so that each complaint names the field and the value.

use super::error::ApiError;
use serde_json::{Map, Value};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// Characters of a value that a message repeats.
const SHOWN_CHARS_MAX: usize = 40;

/// A JSON object, and where it lies within the body (empty for the body itself).
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

/// What the API does with each field of a body. A field in none of the lists is refused.
pub struct Rules {
    pub honoured: &'static [&'static str],
    /// Taken and without effect.
    pub tolerated: &'static [&'static str],
    /// Taken with a value that changes nothing, refused with any other.
    pub neutral: &'static [(&'static str, Neutral)],
}

/// The values of a field that change nothing. `null` always does.
#[derive(Clone, Copy, Debug)]
pub enum Neutral {
    Null,
    Flag(bool),
    /// An empty array, object or string.
    Empty,
    OneOf(&'static [&'static str]),
    /// `{"type": "text"}`
    TextFormat,
    /// `["text"]`
    TextOnly,
}

/// Reads a body as a JSON object.
///
/// # Errors
/// When it is none.
pub fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let text = std::str::from_utf8(bytes).map_err(|error| ApiError::NotUtf8 { at: error.valid_up_to() })?;
    match serde_json::from_str(text).map_err(|error| ApiError::BadJson(error.to_string()))? {
        Value::Object(map) => Ok(map),
        other => Err(ApiError::NotAnObject(kind(&other))),
    }
}

impl<'a> Fields<'a> {
    pub fn of(map: &'a Map<String, Value>) -> Self {
        Self { map, path: String::new() }
    }

    /// The fields of an object within the body.
    ///
    /// # Errors
    /// When `value` is not an object.
    pub fn within(value: &'a Value, path: String) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(bad(path, format_args!("must be an object, not {}", show(other)))),
        }
    }

    /// The field's place in the body, as messages name it.
    pub fn at(&self, name: &str) -> String {
        match &*self.path {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }

    /// The value of a field; `null` is as good as nothing.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// # Errors
    /// For the first field that `rules` do not allow.
    pub fn check(&self, rules: &Rules) -> Result<(), ApiError> {
        for (name, value) in self.map {
            let name = &**name;
            if rules.honoured.contains(&name) || rules.tolerated.contains(&name) {
                continue;
            }
            let param = self.at(name);
            match rules.neutral.iter().find(|(known, _)| *known == name) {
                None => return Err(ApiError::UnknownField { param }),
                Some((_, neutral)) if neutral.allows(value) => {}
                Some((_, neutral)) => {
                    let why = format!("{} is not supported{}", show(value), neutral.hint());
                    return Err(ApiError::Unsupported { param, why });
                }
            }
        }
        Ok(())
    }

    /// # Errors
    /// When the field is there and not a string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// # Errors
    /// When the field is there and neither true nor false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// # Errors
    /// When the field is there and not a number in `range`.
    pub fn number(&self, name: &str, range: &RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let number = self.read(name, "a number", Value::as_f64)?;
        match number {
            Some(number) if !range.contains(&(number as f32)) => {
                let (min, max) = (range.start(), range.end());
                Err(bad(self.at(name), format_args!("must be {min} to {max}, not {number}")))
            }
            number => Ok(number.map(|number| number as f32)),
        }
    }

    /// # Errors
    /// When the field is there and not a whole number from `min` to `max`.
    pub fn whole(&self, name: &str, min: i128, max: i128) -> Result<Option<i128>, ApiError> {
        let number = self.read(name, "a whole number", whole)?;
        match number {
            Some(number) if !(min..=max).contains(&number) => {
                Err(bad(self.at(name), format_args!("must be {min} to {max}, not {number}")))
            }
            number => Ok(number),
        }
    }

    fn read<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(bad(self.at(name), format_args!("must be {wanted}, not {}", show(value)))),
        }
    }
}

impl Neutral {
    fn allows(self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) => true,
            (Self::Flag(neutral), Value::Bool(flag)) => *flag == neutral,
            (Self::Empty, Value::Array(array)) => array.is_empty(),
            (Self::Empty, Value::Object(object)) => object.is_empty(),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::OneOf(names), Value::String(text)) => names.contains(&&**text),
            (Self::TextFormat, Value::Object(format)) => {
                format.len() == 1 && format.get("type").is_some_and(|kind| kind == "text")
            }
            (Self::TextOnly, Value::Array(kinds)) => kinds.iter().all(|kind| kind == "text"),
            _ => false,
        }
    }

    fn hint(self) -> String {
        match self {
            Self::Null => String::new(),
            Self::Flag(flag) => format!(" (only {flag})"),
            Self::Empty => " (only if empty)".into(),
            Self::OneOf(names) => format!(" (only {})", names.join(", ")),
            Self::TextFormat => " (only {\"type\": \"text\"})".into(),
            Self::TextOnly => " (only [\"text\"])".into(),
        }
    }
}

/// The error for a value that cannot be.
pub fn bad(param: String, why: impl Display) -> ApiError {
    ApiError::BadField { param, why: why.to_string() }
}

/// A value in a message: short, and never the whole of it.
pub fn show(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).into(),
        Value::String(text) if text.chars().count() > SHOWN_CHARS_MAX => {
            format!("{:?}...", text.chars().take(SHOWN_CHARS_MAX).collect::<String>())
        }
        other => other.to_string(),
    }
}

/// An integer as it is written: `1.0` and `1e3` are none.
pub fn whole(value: &Value) -> Option<i128> {
    value.as_u64().map(i128::from).or_else(|| value.as_i64().map(i128::from))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
