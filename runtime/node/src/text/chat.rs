//! Chat templates: messages in, a prompt out whose every piece is known to be the template's or somebody's.
//!
//! A template is rendered twice. The first rendering is the prompt. In the second each text that somebody wrote is replaced
//! by one private character, so whatever else is in the result is the template's own. Both must agree once the private
//! characters are replaced by what they stand for; a template that looks into texts or rewrites them makes them differ,
//! and its prompt is refused rather than guessed at. White space around texts, and user-defined tokens within them that the
//! template names (`</think>`), stay visible to it, since templates do trim and split there.

use super::marks::Marks;
use super::model::TextError;
use super::tokenizer::Tokenizer;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use std::collections::BTreeMap;
use std::iter::once;

/// Stand-ins begin here: the last plane is for private use, and no template may hold such characters.
const STAND_IN_FIRST: u32 = 0x10_0000;
/// Texts of one prompt at most: what is left of the plane.
const STAND_INS_MAX: usize = 0xFFFE;
const TEMPLATE: &str = "chat_template";

/// Who says something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    pub const ALL: [Self; 5] = [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool];

    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub role: Role,
    pub content: String,
    pub name: Option<String>,
}

/// A part of a rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// The template's own text: control tokens are read in it.
    Template(String),
    /// What somebody wrote.
    Content(String),
}

/// Why a prompt could not be made of messages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    #[error("the model has no chat template; use /v1/completions")]
    NoTemplate,
    #[error("the model's chat template has no role {0:?}")]
    NoSuchRole(&'static str),
    #[error("the model's chat template refuses the messages: {0}")]
    Refused(String),
    #[error("the model's chat template rewrites the messages in a way that cannot be told apart from its own text")]
    Inseparable,
    #[error("messages hold more than {max} texts")]
    TooManyTexts { max: usize },
}

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    visible: Marks,
    knows_developer: bool,
    knows_tool: bool,
    begin: String,
    end: String,
}

impl ChatTemplate {
    /// `begin` and `end` are the texts that templates know as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// When the source is not a template.
    pub fn new(source: String, tokenizer: &Tokenizer, begin: String, end: String) -> Result<Self, TextError> {
        if let Some(char) = source.chars().find(|&char| char as u32 >= STAND_IN_FIRST) {
            return Err(TextError::Template(format!("it holds the private character {char:?}")));
        }
        let visible = tokenizer.user_defined_named_in(&source)?;
        let knows = |word| source.contains(word);
        let (knows_developer, knows_tool) = (knows("developer"), knows("tool"));
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(|error| TextError::Template(describe(&error)))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(TEMPLATE, source).map_err(|error| TextError::Template(describe(&error)))?;
        Ok(Self { environment, visible, knows_developer, knows_tool, begin, end })
    }

    /// Renders `messages` and the opening of the answer.
    ///
    /// A developer's message is the system's for templates that do not know developers.
    ///
    /// # Errors
    /// When the template does not take the messages, or takes them apart.
    ///
    /// # Cost
    /// Linear in all texts, whatever of them was rendered before.
    pub fn render(&self, messages: &[Message]) -> Result<Vec<Piece>, ChatError> {
        let roles = messages.iter().map(|message| self.role(message.role)).collect::<Result<Vec<_>, _>>()?;
        let mut texts = Texts { visible: &self.visible, stood_for: Vec::new() };
        let mut plain = Vec::with_capacity(messages.len());
        let mut masked = Vec::with_capacity(messages.len());
        for (message, role) in messages.iter().zip(roles) {
            plain.push(entry(role, message.content.clone(), message.name.clone()));
            let name = message.name.as_deref().map(|name| texts.mask(name));
            masked.push(entry(role, texts.mask(&message.content), name));
        }
        if texts.stood_for.len() > STAND_INS_MAX {
            return Err(ChatError::TooManyTexts { max: STAND_INS_MAX });
        }
        let prompt = self.render_entries(plain)?;
        let pieces = texts.unmask(&self.render_entries(masked)?);
        let rest = pieces.iter().try_fold(&*prompt, |rest, piece| {
            let (Piece::Template(text) | Piece::Content(text)) = piece;
            rest.strip_prefix(&**text)
        });
        match rest {
            Some("") => Ok(pieces),
            _ => Err(ChatError::Inseparable),
        }
    }

    fn role(&self, role: Role) -> Result<&'static str, ChatError> {
        match role {
            Role::Developer if !self.knows_developer => Ok(Role::System.name()),
            Role::Tool if !self.knows_tool => Err(ChatError::NoSuchRole(role.name())),
            role => Ok(role.name()),
        }
    }

    fn render_entries(&self, messages: Vec<Value>) -> Result<String, ChatError> {
        // Templates ask `tools is not none`, so what is not there has to be there as none.
        let context = context! {
            messages,
            add_generation_prompt => true,
            bos_token => &self.begin,
            eos_token => &self.end,
            tools => (),
            documents => (),
        };
        let template = self.environment.get_template(TEMPLATE);
        template.and_then(|template| template.render(context)).map_err(|error| ChatError::Refused(describe(&error)))
    }
}

fn entry(role: &'static str, content: String, name: Option<String>) -> Value {
    let name = name.map(|name| ("name", Value::from(name)));
    let fields = [("role", Value::from(role)), ("content", Value::from(content))];
    Value::from(fields.into_iter().chain(name).collect::<BTreeMap<_, _>>())
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// What went wrong, without the place in the template, which says nothing to who sent the messages.
fn describe(error: &Error) -> String {
    match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    }
}

/// The texts that stand-ins stand for.
struct Texts<'a> {
    visible: &'a Marks,
    stood_for: Vec<String>,
}

impl Texts<'_> {
    /// Replaces all of `text` but white space at ends and visible tokens.
    fn mask(&mut self, text: &str) -> String {
        let mut masked = String::new();
        let mut from = 0;
        let end = text.len()..text.len();
        let visible = self.visible;
        for visible in visible.find(text).map(|(range, _)| range).chain(once(end)) {
            let hidden = &text[from..visible.start];
            let core = hidden.trim();
            if core.is_empty() {
                masked.push_str(hidden);
            } else {
                let lead = hidden.len() - hidden.trim_start().len();
                masked.push_str(&hidden[..lead]);
                masked.push(self.stand_in(core));
                masked.push_str(&hidden[lead + core.len()..]);
            }
            masked.push_str(&text[visible.clone()]);
            from = visible.end;
        }
        masked
    }

    fn stand_in(&mut self, text: &str) -> char {
        let index = self.stood_for.len().min(STAND_INS_MAX);
        self.stood_for.push(text.to_owned());
        char::from_u32(STAND_IN_FIRST + index as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    fn unmask(&self, rendered: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        for (at, char) in rendered.char_indices() {
            let Some(index) = (char as u32).checked_sub(STAND_IN_FIRST) else { continue };
            let Some(text) = self.stood_for.get(index as usize) else { continue };
            if from < at {
                pieces.push(Piece::Template(rendered[from..at].to_owned()));
            }
            pieces.push(Piece::Content(text.clone()));
            from = at + char.len_utf8();
        }
        if from < rendered.len() {
            pieces.push(Piece::Template(rendered[from..].to_owned()));
        }
        pieces
    }
}
