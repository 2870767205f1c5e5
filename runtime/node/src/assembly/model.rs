//! The model of a node: its file, its text side and what runs it.

use crate::api::ModelCard;
use crate::config::{self, Config, EngineKind, ModelSource};
use crate::fetch::{self, FetchError};
use crate::text::{TextError, TextModel};
use starling_actors::ActorError;
use starling_core::ids::{RankId, TokenId};
use starling_gpu::Backend;
use starling_gpu::check::Bounds;
use starling_gpu::cpu::{CpuBackend, CpuConfig};
use starling_gpu::llama::{Model, ModelConfig};
use starling_gpu::source::{ModelError, Source};
use starling_gpu::timed::{TimedBackend, TimedConfig};
use starling_gpu::weights::Arithmetic;
use starling_serving::Backends;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{path}: {error}", path = path.display())]
    Text { path: PathBuf, error: TextError },
    #[error(
        "too little memory for one sequence: engine.kv-memory {memory} bytes are {tokens} tokens of KV, one sequence may \
         have {context} (a block of {block_tokens} tokens takes {block_bytes} bytes)"
    )]
    KvMemory { memory: u64, tokens: u64, context: u32, block_tokens: u32, block_bytes: u64 },
    #[error("loading was interrupted: {0}")]
    Interrupted(String),
}

/// A model, ready to run.
pub struct Loaded {
    pub text: Arc<TextModel>,
    sizes: ModelConfig,
    block_bytes: u64,
    owned_by: String,
    /// `None` for the engine that computes nothing.
    weights: Option<Arc<Model>>,
}

impl Loaded {
    /// Fetches the model if need be, and loads it. Takes as long as that takes.
    ///
    /// # Errors
    /// A file that is not there or cannot be used, or too little memory for one sequence.
    pub fn load(config: &Config) -> Result<Self, LoadError> {
        let path = match config.model.source() {
            ModelSource::Path(path) => path,
            ModelSource::Named(name) => fetch::model(&name)?,
        };
        let source = Source::open(&path)?;
        let sizes = ModelConfig::read(&source)?;
        let text = text(&source, sizes.vocabulary).map_err(|error| LoadError::Text { path, error })?;
        let owned_by = match source.gguf() {
            Some(file) => file.get_str("general.organization")?,
            None => None,
        };
        let owned_by = owned_by.unwrap_or("starling").to_owned();
        let arithmetic = match config.engine.arithmetic {
            config::Arithmetic::Int8 => Arithmetic::Int8,
            config::Arithmetic::Exact => Arithmetic::Exact,
        };
        let block_bytes = sizes.block_bytes(arithmetic, config.engine.block_tokens);
        let mut loaded = Self { text: Arc::new(text), sizes, block_bytes, owned_by, weights: None };
        loaded.check_memory(config)?;
        if config.engine.kind == EngineKind::Cpu {
            loaded.weights = Some(Arc::new(Model::load(&source, arithmetic)?));
        }
        Ok(loaded)
    }

    fn check_memory(&self, config: &Config) -> Result<(), LoadError> {
        let block_tokens = config.engine.block_tokens;
        let tokens = u64::from(self.blocks(config)) * u64::from(block_tokens);
        let context = self.context_tokens(config);
        if tokens >= u64::from(context) {
            return Ok(());
        }
        let memory = config.engine.kv_memory.bytes();
        Err(LoadError::KvMemory { memory, tokens, context, block_tokens, block_bytes: self.block_bytes })
    }

    /// Bytes of one KV block of one rank.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// What a backend of this model must be given.
    pub fn bounds(&self, config: &Config) -> Bounds {
        Bounds {
            blocks: self.blocks(config),
            block_tokens: config.engine.block_tokens,
            vocabulary: self.sizes.vocabulary,
            context: self.sizes.context,
        }
    }

    /// KV blocks of one rank.
    pub fn blocks(&self, config: &Config) -> u32 {
        u32::try_from(config.engine.kv_memory.bytes() / self.block_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// Prompt and generated tokens of a sequence, at most.
    pub fn context_tokens(&self, config: &Config) -> u32 {
        let context = self.sizes.context;
        config.engine.context_tokens_max.map_or(context, |most| most.min(context))
    }

    /// Tokens that the model can produce.
    pub fn vocabulary(&self) -> u32 {
        self.sizes.vocabulary
    }

    /// What clients see of the model.
    pub fn card(&self, config: &Config) -> ModelCard {
        let created = SystemTime::now().duration_since(UNIX_EPOCH);
        ModelCard {
            id: config.model.id(),
            context_tokens: self.context_tokens(config),
            created_s: created.map_or(0, |since| since.as_secs()),
            owned_by: self.owned_by.clone(),
        }
    }

    /// Makes the backends of the ranks; the weights are shared.
    pub fn backends(&self, config: &Config) -> Arc<dyn Backends> {
        let (blocks, block_tokens) = (self.blocks(config), config.engine.block_tokens);
        match &self.weights {
            Some(model) => {
                let model = Arc::clone(model);
                let threads = threads_per_rank(config);
                let cpu = CpuConfig { blocks, block_tokens, threads };
                Arc::new(move |_: RankId| -> Result<Box<dyn Backend>, ActorError> {
                    Ok(Box::new(CpuBackend::new(Arc::clone(&model), cpu)?))
                })
            }
            None => {
                let timed = self.timed(config);
                Arc::new(move |_: RankId| -> Result<Box<dyn Backend>, ActorError> {
                    Ok(Box::new(TimedBackend::new(timed.clone())?))
                })
            }
        }
    }

    fn timed(&self, config: &Config) -> TimedConfig {
        let tokenizer = &self.text.tokenizer;
        let vocabulary = self.sizes.vocabulary;
        let silent = |token: &TokenId| tokenizer.is_control(*token) || tokenizer.ends().contains(token);
        TimedConfig {
            bounds: self.bounds(config),
            prefill_per_token: config.engine.timed.prefill_per_token.duration(),
            decode_per_step: config.engine.timed.decode_per_step.duration(),
            decode_per_sequence: config.engine.timed.decode_per_sequence.duration(),
            excluded: (0..vocabulary).filter(silent).collect(),
        }
    }
}

/// The text side, of as many tokens as the embedding has rows. A folder's may have fewer: such embeddings are padded.
fn text(source: &Source, embedding: u32) -> Result<TextModel, TextError> {
    match source {
        Source::Gguf(file) => {
            let text = TextModel::from_gguf(file)?;
            match text.tokenizer.vocabulary_tokens() {
                tokens if tokens == embedding => Ok(text),
                tokens => Err(TextError::VocabularyDiffers { tokens, embedding }),
            }
        }
        Source::Folder(folder) => TextModel::from_folder(folder.path(), embedding),
    }
}

/// The threads of the node, shared out over its ranks.
fn threads_per_rank(config: &Config) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = config.engine.threads.map_or(cores, |threads| threads as usize);
    (all / config.ranks.count.max(1) as usize).max(1)
}
