//! Finds a model's tensors under the names of either kind of file, checks them all, and converts them.

use super::{Family, HeadNorms, Layer, ModelConfig};
use crate::dequant::dequantise;
use crate::source::{ModelError, Source, Tensor};
use crate::weights::{Arithmetic, Linear, Row};
use std::collections::BTreeSet;

/// One tensor under its two names.
#[derive(Clone, Copy)]
pub(super) struct Part {
    gguf: &'static str,
    hub: &'static str,
}

const fn part(gguf: &'static str, hub: &'static str) -> Part {
    Part { gguf, hub }
}

const EMBEDDING: Part = part("token_embd.weight", "model.embed_tokens.weight");
const OUTPUT_NORM: Part = part("output_norm.weight", "model.norm.weight");
const OUTPUT: Part = part("output.weight", "lm_head.weight");
/// Factors of a stretched rope; folders say it in their configuration.
const ROPE_FACTORS: &str = "rope_freqs.weight";

const ATTENTION_NORM: Part = part("attn_norm.weight", "input_layernorm.weight");
const Q: Part = part("attn_q.weight", "self_attn.q_proj.weight");
const K: Part = part("attn_k.weight", "self_attn.k_proj.weight");
const V: Part = part("attn_v.weight", "self_attn.v_proj.weight");
const Q_BIAS: Part = part("attn_q.bias", "self_attn.q_proj.bias");
const K_BIAS: Part = part("attn_k.bias", "self_attn.k_proj.bias");
const V_BIAS: Part = part("attn_v.bias", "self_attn.v_proj.bias");
const Q_NORM: Part = part("attn_q_norm.weight", "self_attn.q_norm.weight");
const K_NORM: Part = part("attn_k_norm.weight", "self_attn.k_norm.weight");
const ATTENTION_OUTPUT: Part = part("attn_output.weight", "self_attn.o_proj.weight");
const FEED_FORWARD_NORM: Part = part("ffn_norm.weight", "post_attention_layernorm.weight");
const GATE: Part = part("ffn_gate.weight", "mlp.gate_proj.weight");
const UP: Part = part("ffn_up.weight", "mlp.up_proj.weight");
const DOWN: Part = part("ffn_down.weight", "mlp.down_proj.weight");
/// With norms behind both halves of a layer, hubs call the norm before the second half this.
const FEED_FORWARD_NORM_OF_FOUR: Part = part("ffn_norm.weight", "pre_feedforward_layernorm.weight");
const POST_ATTENTION_NORM: Part = part("post_attention_norm.weight", "post_attention_layernorm.weight");
const POST_FEED_FORWARD_NORM: Part = part("post_ffw_norm.weight", "post_feedforward_layernorm.weight");

/// Invariant: every tensor that is read was found and has its shape.
pub(super) struct Loader<'a> {
    source: &'a Source,
    config: &'a ModelConfig,
    arithmetic: Arithmetic,
}

impl<'a> Loader<'a> {
    /// Looks up and checks everything; nothing is allocated for weights before.
    ///
    /// # Errors
    /// A tensor is missing, has another shape, or is none of the model's.
    pub fn check(source: &'a Source, config: &'a ModelConfig, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let ModelConfig { hidden, heads, kv_heads, head_dim, feed_forward, .. } = *config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let vocabulary = config.vocabulary as usize;
        let mut checker = Checker { loader: Self { source, config, arithmetic }, taken: BTreeSet::new() };
        checker.check(checker.loader.name(EMBEDDING), &[hidden, vocabulary])?;
        checker.check(checker.loader.name(OUTPUT_NORM), &[hidden])?;
        if !config.tied {
            checker.check(checker.loader.name(OUTPUT), &[hidden, vocabulary])?;
        }
        if checker.loader.has_rope_factors() {
            checker.check(ROPE_FACTORS.to_string(), &[head_dim / 2])?;
        }
        let family = config.family;
        for layer in 0..config.layers.len() {
            for (is_there, part, dims) in [
                (true, ATTENTION_NORM, &[hidden][..]),
                (true, Q, &[hidden, q]),
                (true, K, &[hidden, kv]),
                (true, V, &[hidden, kv]),
                (family.has_biases(), Q_BIAS, &[q]),
                (family.has_biases(), K_BIAS, &[kv]),
                (family.has_biases(), V_BIAS, &[kv]),
                (family.has_head_norms(), Q_NORM, &[head_dim]),
                (family.has_head_norms(), K_NORM, &[head_dim]),
                (true, ATTENTION_OUTPUT, &[q, hidden]),
                (family.has_post_norms(), POST_ATTENTION_NORM, &[hidden]),
                (true, feed_forward_norm(family), &[hidden]),
                (true, GATE, &[hidden, feed_forward]),
                (true, UP, &[hidden, feed_forward]),
                (true, DOWN, &[feed_forward, hidden]),
                (family.has_post_norms(), POST_FEED_FORWARD_NORM, &[hidden]),
            ] {
                if is_there {
                    checker.check(checker.loader.in_layer(layer, part), dims)?;
                }
            }
        }
        checker.finish()
    }

    fn name(&self, part: Part) -> String {
        let name = if self.source.gguf().is_some() { part.gguf } else { part.hub };
        name.to_string()
    }

    fn in_layer(&self, layer: usize, part: Part) -> String {
        match self.source {
            Source::Gguf(_) => format!("blk.{layer}.{}", part.gguf),
            Source::Folder(_) => format!("model.layers.{layer}.{}", part.hub),
        }
    }

    fn has_rope_factors(&self) -> bool {
        self.config.family == Family::Llama
            && self.source.gguf().is_some_and(|gguf| gguf.tensor(ROPE_FACTORS).is_some())
    }

    fn tensor(&self, name: &str) -> Tensor<'a> {
        self.source.tensor(name).expect("checked")
    }

    /// Makes a layer of the rows of its outputs.
    fn linear(&self, inputs: usize, rows: &[Row<'_>]) -> Linear {
        Linear::new(self.arithmetic, inputs, rows)
    }

    pub fn embedding(&self) -> Linear {
        self.linear(self.config.hidden, &rows(&self.tensor(&self.name(EMBEDDING))))
    }

    /// `None` if the embedding is the output projection too.
    pub fn output(&self) -> Option<Linear> {
        let output = || self.linear(self.config.hidden, &rows(&self.tensor(&self.name(OUTPUT))));
        (!self.config.tied).then(output)
    }

    pub fn output_norm(&self) -> Vec<f32> {
        self.norm(&self.name(OUTPUT_NORM))
    }

    /// By how much each pair of a head turns slower than its base says.
    pub fn rope_factors(&self) -> Option<Vec<f32>> {
        self.has_rope_factors().then(|| self.vector(ROPE_FACTORS))
    }

    pub fn layer(&self, layer: usize) -> Layer {
        let ModelConfig { hidden, heads, head_dim, feed_forward, family, .. } = *self.config;
        let named = |part: Part| self.in_layer(layer, part);
        let norm = |part: Part| self.norm(&named(part));
        let bias = || [Q_BIAS, K_BIAS, V_BIAS].into_iter().flat_map(|part| self.vector(&named(part))).collect();
        let matrix = |inputs: usize, parts: &[Part]| {
            let tensors: Vec<_> = parts.iter().map(|&part| self.tensor(&named(part))).collect();
            self.linear(inputs, &tensors.iter().flat_map(rows).collect::<Vec<_>>())
        };
        let [q, k, v] = [Q, K, V].map(|part| self.tensor(&named(part)));
        let qkv = [self.turned_rows(&q), self.turned_rows(&k), rows(&v)].concat();
        Layer {
            attention: self.config.layers[layer],
            attention_norm: norm(ATTENTION_NORM),
            qkv: self.linear(hidden, &qkv),
            qkv_bias: family.has_biases().then(bias),
            head_norms: family.has_head_norms().then(|| HeadNorms { query: norm(Q_NORM), key: norm(K_NORM) }),
            attention_output: matrix(heads * head_dim, &[ATTENTION_OUTPUT]),
            post_attention_norm: family.has_post_norms().then(|| norm(POST_ATTENTION_NORM)),
            feed_forward_norm: norm(feed_forward_norm(family)),
            gate_up: matrix(hidden, &[GATE, UP]),
            down: matrix(feed_forward, &[DOWN]),
            post_feed_forward_norm: family.has_post_norms().then(|| norm(POST_FEED_FORWARD_NORM)),
        }
    }

    /// Rows of queries or keys, such that a head's pairs are its first half with its second.
    ///
    /// GGUF files of `llama` have pairs side by side; all others, and folders, have them in halves. Scores do not
    /// depend on the order as long as queries and keys have the same.
    fn turned_rows<'t>(&self, tensor: &Tensor<'t>) -> Vec<Row<'t>> {
        let stored = rows(tensor);
        if self.config.family != Family::Llama || self.source.gguf().is_none() {
            return stored;
        }
        let heads = stored.chunks_exact(self.config.head_dim);
        heads.flat_map(|head| head.iter().step_by(2).chain(head.iter().skip(1).step_by(2)).copied()).collect()
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        let tensor = self.tensor(name);
        let mut out = vec![0.0; tensor.dims[0]];
        dequantise(tensor.kind, tensor.bytes, &mut out);
        out
    }

    /// The weights of a norm. Folders of Gemma hold them less one.
    fn norm(&self, name: &str) -> Vec<f32> {
        let mut weights = self.vector(name);
        if self.config.family == Family::Gemma3 && self.source.gguf().is_none() {
            weights.iter_mut().for_each(|weight| *weight += 1.0);
        }
        weights
    }
}

fn feed_forward_norm(family: Family) -> Part {
    if family.has_post_norms() { FEED_FORWARD_NORM_OF_FOUR } else { FEED_FORWARD_NORM }
}

fn rows<'a>(tensor: &Tensor<'a>) -> Vec<Row<'a>> {
    let row_bytes = tensor.dims[0] / tensor.kind.block_weights() * tensor.kind.block_bytes();
    tensor.bytes.chunks_exact(row_bytes).map(|row| (tensor.kind, row)).collect()
}

struct Checker<'a> {
    loader: Loader<'a>,
    taken: BTreeSet<String>,
}

impl<'a> Checker<'a> {
    fn check(&mut self, name: String, dims: &[usize]) -> Result<(), ModelError> {
        let file = || self.loader.source.path().to_path_buf();
        let Some(tensor) = self.loader.source.tensor(&name) else {
            return Err(ModelError::MissingTensor { file: file(), tensor: name });
        };
        if tensor.dims != dims {
            let (found, wanted) = (tensor.dims, dims.to_vec());
            return Err(ModelError::WrongShape { file: file(), tensor: name, found, wanted });
        }
        self.taken.insert(name);
        Ok(())
    }

    /// A tensor that is not read would be a part of the model that is left out: a bias, say.
    fn finish(self) -> Result<Loader<'a>, ModelError> {
        let source = self.loader.source;
        let left = source.names().into_iter().find(|&name| !self.taken.contains(name) && !self.is_surplus(name));
        match left {
            Some(name) => {
                Err(ModelError::UnexpectedTensor { file: source.path().to_path_buf(), tensor: name.to_string() })
            }
            None => Ok(self.loader),
        }
    }

    /// Tensors of folders that say nothing new: a copy of a tied embedding, and angles that old versions stored.
    fn is_surplus(&self, name: &str) -> bool {
        let is_copy = self.loader.config.tied && name == OUTPUT.hub;
        self.loader.source.gguf().is_none() && (is_copy || name.ends_with(".self_attn.rotary_emb.inv_freq"))
    }
}
