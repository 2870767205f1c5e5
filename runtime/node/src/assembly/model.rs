//! The model of a node: its file, its text side and what runs it.

use super::pools::{self, PoolsError};
use crate::api::ModelCard;
use crate::config::{self, Config, EngineKind, ModelSource};
use crate::fetch::{self, FetchError};
use crate::text::{TextError, TextModel};
use starling_actors::ActorError;
use starling_core::ids::TokenId;
use starling_core::kv;
use starling_core::kv::cache::rebalance;
use starling_gpu::Backend;
use starling_gpu::check::Bounds;
use starling_gpu::cpu::{CpuBackend, CpuConfig};
use starling_gpu::llama::{LayerGroup, Model, ModelConfig};
use starling_gpu::source::{ModelError, Source};
use starling_gpu::timed::{TimedBackend, TimedConfig};
use starling_gpu::weights::Arithmetic;
use starling_serving::{Backends, LocalRank};
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
    #[error(transparent)]
    Pools(#[from] PoolsError),
    #[error("loading was interrupted: {0}")]
    Interrupted(String),
}

/// A model, ready to run.
pub struct Loaded {
    pub text: Arc<TextModel>,
    sizes: ModelConfig,
    groups: Vec<LayerGroup>,
    kv: kv::Config,
    kv_sizing: Option<rebalance::Pools>,
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
        let groups = sizes.life_cycles(arithmetic, config.engine.block_tokens);
        let context = context_tokens(config, sizes.context);
        let kv = pools::manager(config, &groups, context)?;
        let kv_sizing = pools::sized_for(config, &groups, context)?;
        let mut loaded = Self { text: Arc::new(text), sizes, groups, kv, kv_sizing, owned_by, weights: None };
        if config.engine.kind == EngineKind::Cpu {
            loaded.weights = Some(Arc::new(Model::load(&source, arithmetic)?));
        }
        Ok(loaded)
    }

    /// The KV manager of one rank.
    pub fn kv(&self) -> &kv::Config {
        &self.kv
    }

    /// What the pools of one rank were sized for.
    pub fn kv_sizing(&self) -> Option<&rebalance::Pools> {
        self.kv_sizing.as_ref()
    }

    /// Gives each pool so many blocks, whatever memory they take.
    pub fn set_blocks(&mut self, blocks: u32) {
        self.kv.cache.tiers = vec![vec![blocks; self.groups.len()]];
        self.kv_sizing = None;
    }

    /// What a backend of this model must be given.
    pub fn bounds(&self) -> Bounds {
        let kv::Shape { block_tokens, pools } = self.kv.shape();
        let ModelConfig { vocabulary, context, .. } = self.sizes;
        Bounds { pools, block_tokens: block_tokens.get(), vocabulary, context }
    }

    /// Prompt and generated tokens of a sequence, at most.
    pub fn context_tokens(&self, config: &Config) -> u32 {
        context_tokens(config, self.sizes.context)
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
        let kv::Shape { block_tokens, pools } = self.kv.shape();
        match &self.weights {
            Some(model) => {
                let model = Arc::clone(model);
                let threads = threads_per_rank(config);
                let blocks = pools.iter().map(|pool| pool.blocks).collect();
                let cpu = CpuConfig { blocks, block_tokens: block_tokens.get(), threads };
                Arc::new(move |_: LocalRank| -> Result<Box<dyn Backend>, ActorError> {
                    Ok(Box::new(CpuBackend::new(Arc::clone(&model), cpu.clone())?))
                })
            }
            None => {
                let timed = self.timed(config);
                Arc::new(move |_: LocalRank| -> Result<Box<dyn Backend>, ActorError> {
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
            bounds: self.bounds(),
            prefill_per_token: config.engine.timed.prefill_per_token.duration(),
            decode_per_step: config.engine.timed.decode_per_step.duration(),
            decode_per_sequence: config.engine.timed.decode_per_sequence.duration(),
            excluded: (0..vocabulary).filter(silent).collect(),
        }
    }
}

fn context_tokens(config: &Config, context: u32) -> u32 {
    config.engine.context_tokens_max.map_or(context, |most| most.min(context))
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
