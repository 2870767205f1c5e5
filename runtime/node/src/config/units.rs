//! Values of the configuration that carry a unit: sizes, periods, secrets.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

/// A text that is not the value it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error(
        "{0:?} is not a size; write a whole number and a unit, such as \"512MiB\" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)"
    )]
    Size(String),
    #[error("{0:?} is not a duration; write a whole number and a unit, such as \"250ms\" (ns, us, ms, s, m, h)")]
    Period(String),
    #[error("{0:?} is larger than 64 bits can hold")]
    TooLarge(String),
    #[error("{0:?} is not a host and port such as \"10.0.0.1:8002\"")]
    HostPort(String),
}

/// Largest unit first, so that printing finds the shortest form.
const SIZES: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
];

/// Nanoseconds of each unit, largest first.
const PERIODS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// Reads `NUMBER UNIT`; `None` when the text has another form, `Some(None)` when it overflows.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<Option<u64>> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).filter(|at| *at > 0)?;
    let (number, unit) = text.split_at(split);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim_start())?;
    Some(number.parse::<u64>().ok().and_then(|n| n.checked_mul(*factor)))
}

fn print(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let exact = units.iter().find(|(_, factor)| value != 0 && value.is_multiple_of(*factor));
    let (unit, factor) = exact.unwrap_or(&units[units.len() - 1]);
    write!(f, "{}{unit}", value / factor)
}

/// A number of bytes, written `"80GiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Size {
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bytes = parse(text, &SIZES).ok_or_else(|| UnitError::Size(text.into()))?;
        bytes.map(Self).ok_or_else(|| UnitError::TooLarge(text.into()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, &SIZES)
    }
}

/// A span of time, written `"250ms"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period {
    nanos: u64,
}

impl Period {
    pub const fn secs(n: u64) -> Self {
        Self { nanos: n * 1_000_000_000 }
    }

    pub const fn millis(n: u64) -> Self {
        Self { nanos: n * 1_000_000 }
    }

    pub const fn micros(n: u64) -> Self {
        Self { nanos: n * 1_000 }
    }

    pub const fn duration(self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    pub const fn as_micros(self) -> u64 {
        self.nanos / 1_000
    }

    pub const fn as_millis(self) -> u64 {
        self.nanos / 1_000_000
    }
}

impl FromStr for Period {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let nanos = parse(text, &PERIODS).ok_or_else(|| UnitError::Period(text.into()))?;
        nanos.map(|nanos| Self { nanos }).ok_or_else(|| UnitError::TooLarge(text.into()))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.nanos, &PERIODS)
    }
}

/// Reads an address and port, and says what it read when it is none.
pub fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong = || D::Error::custom(format!("{text:?} is not an address and port such as \"127.0.0.1:8000\""));
    text.parse().map_err(|_| wrong())
}

/// Where a peer is reached: a name or an address, and a port. Names are looked up by whoever dials.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    host: String,
    port: NonZeroU16,
}

/// Longest name of the domain name system.
const HOST_BYTES_MAX: usize = 253;

impl HostPort {
    /// An IPv6 address without its brackets.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    pub const fn port(&self) -> u16 {
        self.port.get()
    }
}

impl FromStr for HostPort {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let wrong = || UnitError::HostPort(text.chars().take(HOST_BYTES_MAX + 10).collect());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let legal = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(address) => address.parse::<Ipv6Addr>().is_ok(),
            None => {
                let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
                (1..=HOST_BYTES_MAX).contains(&host.len()) && host.chars().all(named)
            }
        };
        let digits = port.bytes().all(|byte| byte.is_ascii_digit());
        let port = port.parse().ok().filter(|_| legal && digits).ok_or_else(wrong)?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// A bearer key. Its text leaves this type by `expose` only; printed, it is redacted.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// What stands for a secret wherever one would be printed.
pub const REDACTED: &str = "<redacted>";

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(REDACTED)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
    }
}

impl schemars::JsonSchema for Secret {
    fn schema_name() -> Cow<'static, str> {
        "Secret".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}

macro_rules! written_as_text {
    ($name:ident, $what:literal, $pattern:literal, $example:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($what)
                    }
                    fn visit_str<E: Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_str(Text)
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "pattern": $pattern, "examples": [$example] })
            }
        }
    };
}

written_as_text!(Size, "a size such as \"512MiB\"", "^[0-9]+ *([KMGT]i?)?B$", "512MiB");
written_as_text!(Period, "a duration such as \"250ms\"", "^[0-9]+ *(ns|us|ms|s|m|h)$", "250ms");
written_as_text!(HostPort, "a host and port such as \"10.0.0.1:8002\"", "^.+:[0-9]+$", "10.0.0.1:8002");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_size_is_a_whole_number_and_a_unit() {
        assert_eq!("80GiB".parse(), Ok(Size(80 << 30)));
        assert_eq!(" 12 KB ".parse(), Ok(Size(12_000)));
        for wrong in ["", "12", "GiB", "-1GiB", "1.5GiB", "12 parsecs", "１GiB", "1GiB1"] {
            assert_eq!(wrong.parse::<Size>(), Err(UnitError::Size(wrong.into())));
        }
        assert_eq!("99999999TiB".parse::<Size>(), Err(UnitError::TooLarge("99999999TiB".into())));
    }

    #[test]
    fn a_period_is_a_whole_number_and_a_unit() {
        assert_eq!("250ms".parse(), Ok(Period::millis(250)));
        assert_eq!("2 m".parse(), Ok(Period::secs(120)));
        assert_eq!("5".parse::<Period>(), Err(UnitError::Period("5".into())));
    }

    #[test]
    fn a_host_and_port_are_both_there() {
        for (text, host, port) in [
            ("10.0.0.1:8002", "10.0.0.1", 8002),
            ("node-0.starling:1", "node-0.starling", 1),
            ("[::1]:65535", "::1", 65535),
        ] {
            let place: HostPort = text.parse().unwrap();
            assert_eq!((place.host(), place.port(), place.to_string().as_str()), (host, port, text));
        }
        for wrong in ["", "h", "h:", ":1", "h:0", "h:65536", "h:+1", "a b:1", "::1:1", "[::1:1", "[h]:1", "http://h:1"]
        {
            assert_eq!(wrong.parse::<HostPort>(), Err(UnitError::HostPort(wrong.into())));
        }
    }

    #[test]
    fn a_secret_is_never_printed() {
        let secret = Secret::new("sk-live-1234");
        assert_eq!(format!("{secret:?}"), REDACTED);
        assert_eq!(serde_json::to_string(&secret).unwrap(), format!("{REDACTED:?}"));
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(n: u64) {
            prop_assert_eq!(Size(n).to_string().parse(), Ok(Size(n)));
            prop_assert_eq!((Period { nanos: n }).to_string().parse(), Ok(Period { nanos: n }));
        }
    }
}
