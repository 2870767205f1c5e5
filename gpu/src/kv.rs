//! The memory of KV blocks.

use starling_core::ids::BlockId;
use starling_core::step::Table;

pub mod halves;
#[cfg(test)]
mod tests;

/// How keys and values of one model lie in a block.
///
/// # Shape
/// A layer's memory is `[blocks][2][kv_heads][block_tokens][head_dim]`, the 2 being keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    pub kv_heads: usize,
    pub head_dim: usize,
    pub block_tokens: usize,
}

impl BlockShape {
    /// Numbers of one head's keys, or values, in a block.
    fn head_numbers(&self) -> usize {
        self.block_tokens * self.head_dim
    }

    /// Numbers of one block in one layer.
    fn block_numbers(&self) -> usize {
        2 * self.kv_heads * self.head_numbers()
    }

    /// Bytes of one block over all layers, with numbers of so many bytes; `None` if that does not fit.
    pub fn block_bytes(&self, layers: usize, number_bytes: usize) -> Option<u64> {
        let numbers = [2, self.kv_heads, self.block_tokens, self.head_dim, layers, number_bytes];
        let bytes = numbers.iter().try_fold(1_usize, |product, &n| product.checked_mul(n))?;
        Some(bytes as u64)
    }
}

/// A table as kernels read it: where its ordinals are in its list is worked out once.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    blocks: &'a [BlockId],
    /// Ordinals before those that are out of the window, and how many of these there are.
    kept: usize,
    out: usize,
}

impl<'a> Blocks<'a> {
    fn of(table: &'a Table) -> Self {
        Self { blocks: &table.blocks, kept: table.out.start as usize, out: table.out.len() }
    }

    /// The block of a position. That it has one is what steps are checked for.
    #[inline(always)]
    fn block(&self, position: usize, block_tokens: usize) -> usize {
        let ordinal = position / block_tokens;
        let out = if ordinal < self.kept { 0 } else { self.out };
        self.blocks[ordinal - out].0 as usize
    }
}

/// The KV blocks of some layers of a rank, as many in each of them.
///
/// The memory is zero and not touched until written, so that the system gives it when it is used.
pub struct KvPool {
    shape: BlockShape,
    layers: Vec<Vec<f32>>,
}

impl KvPool {
    /// `None` if so much memory cannot be addressed.
    pub fn new(shape: BlockShape, layers: usize, blocks: usize) -> Option<Self> {
        let bytes = shape.block_bytes(layers, size_of::<f32>())?.checked_mul(blocks as u64)?;
        isize::try_from(bytes).ok()?;
        let layers = (0..layers).map(|_| vec![0.0; shape.block_numbers() * blocks]).collect();
        Some(Self { shape, layers })
    }

    pub fn shape(&self) -> BlockShape {
        self.shape
    }

    /// Stores one token's keys and values: a row of `kv_heads` heads each.
    pub fn write(&mut self, layer: usize, table: &Table, position: usize, (keys, values): (&[f32], &[f32])) {
        let BlockShape { head_dim, block_tokens, .. } = self.shape;
        let block = Blocks::of(table).block(position, block_tokens);
        let (size, head_size) = (self.shape.block_numbers(), self.shape.head_numbers());
        let block = &mut self.layers[layer][block * size..][..size];
        let (key_heads, value_heads) = block.split_at_mut(size / 2);
        let at = position % block_tokens * head_dim;
        for (side, row) in [(key_heads, keys), (value_heads, values)] {
            for (head, row) in side.chunks_exact_mut(head_size).zip(row.chunks_exact(head_dim)) {
                head[at..at + head_dim].copy_from_slice(row);
            }
        }
    }

    /// Copies one block in all layers.
    pub fn copy(&mut self, from: BlockId, to: BlockId) {
        let (size, from, to) = (self.shape.block_numbers(), from.0 as usize, to.0 as usize);
        self.layers.iter_mut().for_each(|layer| layer.copy_within(from * size..(from + 1) * size, to * size));
    }

    /// What one head of a layer reads.
    pub fn head<'a>(&'a self, layer: usize, kv_head: usize, table: &'a Table) -> KvHead<'a> {
        KvHead { shape: self.shape, layer: &self.layers[layer], kv_head, blocks: Blocks::of(table) }
    }
}

/// One sequence's keys and values of one head, where they lie.
#[derive(Clone, Copy)]
pub struct KvHead<'a> {
    shape: BlockShape,
    layer: &'a [f32],
    kv_head: usize,
    blocks: Blocks<'a>,
}

impl<'a> KvHead<'a> {
    pub fn head_dim(&self) -> usize {
        self.shape.head_dim
    }

    /// The keys and values of positions from `from` to `to` or the end of the block, whichever comes first; `to` is above
    /// `from`.
    pub fn run(&self, from: usize, to: usize) -> (&'a [f32], &'a [f32]) {
        let BlockShape { head_dim, block_tokens, .. } = self.shape;
        let (size, head_size) = (self.shape.block_numbers(), self.shape.head_numbers());
        let block = self.blocks.block(from, block_tokens);
        let first = from % block_tokens;
        let count = (to - from).min(block_tokens - first);
        let keys = block * size + self.kv_head * head_size + first * head_dim;
        let values = keys + size / 2;
        (&self.layer[keys..][..count * head_dim], &self.layer[values..][..count * head_dim])
    }
}
