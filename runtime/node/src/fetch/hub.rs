//! Models of the Hugging Face hub, by name: `hf:OWNER/NAME`, `hf:OWNER/NAME/FILE.gguf`, each with `@REVISION` if need be.

#[cfg(feature = "hub")]
mod client;
#[cfg(all(test, feature = "hub"))]
mod tests;

#[cfg(feature = "hub")]
pub use client::Hub;

use std::fmt;
use std::str::FromStr;

/// What names of such models begin with.
pub const PREFIX: &str = "hf:";

/// A repository, at a revision, and the one file that is wanted of it, if not the model folder that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// `OWNER/NAME`.
    pub repository: String,
    pub file: Option<String>,
    /// A branch, a tag or a commit; without it the default branch.
    pub revision: Option<String>,
}

/// Why a name names no model of the hub.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not hf:OWNER/NAME or hf:OWNER/NAME/FILE.gguf, with @REVISION if need be ({why})")]
pub struct HubNameError {
    name: String,
    why: &'static str,
}

impl FromStr for HubName {
    type Err = HubNameError;

    fn from_str(name: &str) -> Result<Self, HubNameError> {
        let bad = |why| HubNameError { name: name.to_owned(), why };
        let rest = name.strip_prefix(PREFIX).ok_or_else(|| bad("it does not begin with hf:"))?;
        let (path, revision) = match rest.split_once('@') {
            Some((_, "")) => return Err(bad("the revision is empty")),
            Some((path, revision)) => (path, Some(revision.to_owned())),
            None => (rest, None),
        };
        let parts: Vec<&str> = path.split('/').collect();
        let is_plain = |part: &&str| {
            let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            !part.is_empty() && !part.starts_with('.') && part.bytes().all(known)
        };
        if !parts.iter().all(is_plain) {
            return Err(bad("its parts are of letters, digits and -_. and do not begin with a full stop"));
        }
        let is_file = parts.last().is_some_and(|last| last.to_ascii_lowercase().ends_with(".gguf"));
        let (owner, name, file) = match &parts[..] {
            [owner, name] if !is_file => (owner, name, None),
            [owner, name, file @ ..] if is_file && !file.is_empty() => (owner, name, Some(file.join("/"))),
            [_] => return Err(bad("the owner is missing")),
            _ if is_file => return Err(bad("a file needs owner and name before it")),
            _ => return Err(bad("only files that end with .gguf can be named")),
        };
        Ok(Self { repository: format!("{owner}/{name}"), file, revision })
    }
}

impl HubName {
    /// What clients call the model: the repository's name, or the file's without its ending.
    pub fn id(&self) -> String {
        let file = self.file.as_deref().and_then(|file| file.rsplit('/').next());
        let stem = file.map(|file| file[..file.len() - ".gguf".len()].to_owned());
        stem.unwrap_or_else(|| self.repository.clone())
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.repository)?;
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod name_tests {
    use super::*;

    #[test]
    fn a_name_is_a_repository_a_file_and_a_revision() {
        let read = |name: &str| {
            let read: HubName = name.parse().unwrap();
            assert_eq!(read.to_string(), name);
            (read.id(), read.repository, read.file, read.revision)
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read("hf:a/b-1.5"), ("a/b-1.5".into(), "a/b-1.5".into(), None, None));
        assert_eq!(read("hf:a/b@refs/pr/1"), ("a/b".into(), "a/b".into(), None, some("refs/pr/1")));
        assert_eq!(read("hf:a/b/m.Q4.gguf"), ("m.Q4".into(), "a/b".into(), some("m.Q4.gguf"), None));
        assert_eq!(read("hf:a/b/q4/m.GGUF@v1"), ("m".into(), "a/b".into(), some("q4/m.GGUF"), some("v1")));
    }

    #[test]
    fn what_names_no_model_of_the_hub_is_refused_with_the_reason() {
        for (name, why) in [
            ("a/b", "does not begin with hf:"),
            ("hf:", "letters, digits"),
            ("hf:a", "owner is missing"),
            ("hf:a/b@", "revision is empty"),
            ("hf:a/b/c", "only files that end with .gguf"),
            ("hf:a/b.gguf", "needs owner and name"),
            ("hf:a//b.gguf", "letters, digits"),
            ("hf:../b/c.gguf", "full stop"),
            ("hf:a/b c", "letters, digits"),
        ] {
            let error = name.parse::<HubName>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name:?} is not")) && error.contains(why), "{error}");
        }
    }
}
