//! KV blocks of f16, as the int8 mode has them.

use super::{BlockShape, Blocks};
use half::f16;
use half::slice::HalfFloatSliceExt;
use memmap2::MmapMut;
use starling_core::ids::BlockId;
use starling_core::step::Table;
use std::marker::PhantomData;

/// The KV blocks of some layers of a rank, as many in each of them.
///
/// # Shape
/// A layer's memory is `[blocks][kv_heads][2][block_tokens * head_dim]`, the 2 being keys and values. Keys lie with the
/// tokens side by side (`[head_dim][block_tokens]`), so that a vector holds one number of several keys and scores need no
/// sums across a vector; values lie token by token (`[block_tokens][head_dim]`).
///
/// The memory is zero and not touched until written, so that the system gives it when it is used.
pub struct HalfPool {
    shape: BlockShape,
    layers: Vec<Numbers>,
}

/// Numbers that start as zero, in huge pages where the system has them: a sequence's blocks lie all over the pool, and with
/// small ones nearly each would cost a walk through the page tables.
struct Numbers(MmapMut);

impl Numbers {
    /// `None` if the system does not give so much; `count` is above 0.
    fn new(count: usize) -> Option<Self> {
        let memory = MmapMut::map_anon(count.checked_mul(size_of::<u16>())?).ok()?;
        // Without them it is slower, that is all.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Some(Self(memory))
    }

    fn as_mut_slice(&mut self) -> &mut [u16] {
        let count = self.0.len() / size_of::<u16>();
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), count) }
    }

    fn as_slice(&self) -> &[u16] {
        // SAFETY: the mapping begins at a page, is as long as `count` numbers, and any bits are a number.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() / size_of::<u16>()) }
    }
}

impl HalfPool {
    /// `None` if so much memory cannot be addressed.
    pub fn new(shape: BlockShape, layers: usize, blocks: usize) -> Option<Self> {
        let bytes = shape.block_bytes(layers, size_of::<f16>())?.checked_mul(blocks as u64)?;
        isize::try_from(bytes).ok()?;
        let layers = (0..layers).map(|_| Numbers::new(shape.block_numbers() * blocks)).collect::<Option<_>>()?;
        Some(Self { shape, layers })
    }

    /// Copies one block in all layers.
    pub fn copy(&mut self, from: BlockId, to: BlockId) {
        let (size, from, to) = (self.shape.block_numbers(), from.0 as usize, to.0 as usize);
        let of_block = from * size..(from + 1) * size;
        self.layers.iter_mut().for_each(|layer| layer.as_mut_slice().copy_within(of_block.clone(), to * size));
    }

    /// What one head of a layer reads.
    pub fn head<'a>(&'a self, layer: usize, kv_head: usize, table: &'a Table) -> HalfHead<'a> {
        HalfHead { shape: self.shape, layer: self.layers[layer].as_slice(), kv_head, blocks: Blocks::of(table) }
    }

    /// For parts that write different tokens of a layer.
    pub fn writer(&mut self, layer: usize) -> HalfWriter<'_> {
        let layer = &mut self.layers[layer];
        let length = layer.0.len() / size_of::<u16>();
        HalfWriter { shape: self.shape, numbers: layer.0.as_mut_ptr().cast(), length, memory: PhantomData }
    }
}

/// Writes keys and values of one layer from several threads.
pub struct HalfWriter<'a> {
    shape: BlockShape,
    numbers: *mut u16,
    length: usize,
    memory: PhantomData<&'a mut [u16]>,
}

// SAFETY: by the contract of `put`, no two threads write the same token's places.
unsafe impl Sync for HalfWriter<'_> {}

impl HalfWriter<'_> {
    /// Stores one token's keys and values: a row of `kv_heads` heads each.
    ///
    /// # Safety
    /// Nobody else writes this position of this table's blocks meanwhile.
    pub unsafe fn put(&self, table: &Table, position: usize, (keys, values): (&[f32], &[f32])) {
        let BlockShape { kv_heads, head_dim, block_tokens } = self.shape;
        assert!(keys.len() == kv_heads * head_dim && values.len() == keys.len(), "{} numbers", keys.len());
        let block = Blocks::of(table).block(position, block_tokens) * self.shape.block_numbers();
        let (size, token) = (self.shape.head_numbers(), position % block_tokens);
        assert!(block + self.shape.block_numbers() <= self.length, "a block of the pool");
        let mut halves = [f16::ZERO; STRETCH];
        for head in 0..kv_heads {
            let (keys, values) = (&keys[head * head_dim..][..head_dim], &values[head * head_dim..][..head_dim]);
            let start = block + 2 * head * size;
            for first in (0..head_dim).step_by(STRETCH) {
                let halves = &mut halves[..STRETCH.min(head_dim - first)];
                halves.convert_from_f32_slice(&keys[first..first + halves.len()]);
                for (i, half) in halves.iter().enumerate() {
                    let at = start + (first + i) * block_tokens + token;
                    // SAFETY: within the block, and these places are this token's.
                    unsafe { *self.numbers.add(at) = half.to_bits() };
                }
                halves.convert_from_f32_slice(&values[first..first + halves.len()]);
                for (i, half) in halves.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { *self.numbers.add(start + size + token * head_dim + first + i) = half.to_bits() };
                }
            }
        }
    }
}

/// Tokens of a block that is asked for as a whole: a split of the attention.
const PREFETCHED_TOKENS_MAX: usize = 64;
/// Numbers that are converted at once.
const STRETCH: usize = 64;

/// One sequence's keys and values of one head, where they lie.
#[derive(Clone, Copy)]
pub struct HalfHead<'a> {
    shape: BlockShape,
    layer: &'a [u16],
    kv_head: usize,
    blocks: Blocks<'a>,
}

impl<'a> HalfHead<'a> {
    pub fn head_dim(&self) -> usize {
        self.shape.head_dim
    }

    /// Numbers from one dimension of a key to the next.
    pub fn key_stride(&self) -> usize {
        self.shape.block_tokens
    }

    /// Positions from `from` on that lie in one block, `to` or the block's end excluded.
    pub fn stretch(&self, from: usize, to: usize) -> usize {
        (to - from).min(self.shape.block_tokens - from % self.shape.block_tokens)
    }

    /// The keys from a position to the end of its block: the first number of each, `key_stride` from one to the next.
    pub fn keys(&self, position: usize) -> &'a [u16] {
        let start = self.start(position);
        &self.layer[start + position % self.shape.block_tokens..start + self.shape.head_numbers()]
    }

    /// The values from a position to the end of its block, one after the other.
    pub fn values(&self, position: usize) -> &'a [u16] {
        let BlockShape { head_dim, block_tokens, .. } = self.shape;
        let (start, size) = (self.start(position), self.shape.head_numbers());
        &self.layer[start + size + position % block_tokens * head_dim..start + 2 * size]
    }

    /// Asks for the keys and values of a position's block, which will be read soon.
    pub fn prefetch(&self, position: usize) {
        // Of a larger block only a part is next.
        if self.shape.block_tokens > PREFETCHED_TOKENS_MAX {
            return;
        }
        const LINE: usize = 64 / size_of::<u16>();
        #[cfg(target_arch = "x86_64")]
        for line in self.layer[self.start(position)..][..2 * self.shape.head_numbers()].chunks(LINE) {
            // SAFETY: a hint, for memory that is there.
            unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) };
        }
    }

    fn start(&self, position: usize) -> usize {
        let block = self.blocks.block(position, self.shape.block_tokens);
        block * self.shape.block_numbers() + 2 * self.kv_head * self.shape.head_numbers()
    }
}
