//! Models with windows: blocks that are out of one are given away, and no bit of an answer changes.

use super::*;
use crate::cpu::pool::Memory;
use crate::dequant::TensorType;
use crate::llama::Family;
use starling_core::step::BlockCopy;
use std::num::NonZeroU32;

/// A rank and its free blocks, those of each life cycle. All blocks that no sequence has hold NaN.
struct Rank {
    backend: CpuBackend,
    free: Vec<Vec<BlockId>>,
    /// Whether sequences give blocks away that are out of the window.
    releases: bool,
}

/// A sequence: its tokens, how many are computed, and its tables.
struct Sequence {
    tokens: Vec<TokenId>,
    computed: usize,
    tables: Vec<Table>,
}

impl Sequence {
    fn new(tokens: Vec<TokenId>) -> Self {
        Self { tokens, computed: 0, tables: Vec::new() }
    }
}

impl Rank {
    fn new(model: &Arc<Model>, (blocks, block_tokens): (&[u32], u32), releases: bool) -> Self {
        let config = CpuConfig { blocks: blocks.to_vec(), block_tokens, threads: 2 };
        let backend = CpuBackend::new(Arc::clone(model), config).unwrap();
        let free: Vec<Vec<BlockId>> = blocks.iter().map(|&count| (0..count).map(BlockId).collect()).collect();
        let mut rank = Self { backend, free: free.clone(), releases };
        for (life_cycle, blocks) in free.iter().enumerate() {
            blocks.iter().for_each(|&block| rank.spoil(life_cycle, block));
        }
        rank
    }

    fn spoil(&mut self, life_cycle: usize, block: BlockId) {
        let (table, block_tokens) = (Table::whole(vec![block]), self.backend.bounds.block_tokens);
        let sizes = self.backend.model.config();
        let nan = vec![f32::NAN; sizes.kv_heads * sizes.head_dim];
        let layers = sizes.life_cycles(Arithmetic::Exact, block_tokens)[life_cycle].layers.len();
        for (layer, position) in (0..layers).flat_map(|layer| (0..block_tokens as usize).map(move |at| (layer, at))) {
            match &mut self.backend.pool.memory {
                Memory::Exact(pools) => pools[life_cycle].write(layer, &table, position, (&nan, &nan)),
                // SAFETY: one position after the other.
                Memory::Int8(pools) => unsafe { pools[life_cycle].writer(layer).put(&table, position, (&nan, &nan)) },
            }
        }
    }

    /// Takes the blocks that the sequence needs up to `end`, after giving away those that it does not read any more.
    fn make_room(&mut self, sequence: &mut Sequence, end: usize) {
        let block_tokens = NonZeroU32::new(self.backend.bounds.block_tokens).unwrap();
        sequence.tables.resize(self.free.len(), Table::default());
        for life_cycle in 0..self.free.len() {
            let table = &mut sequence.tables[life_cycle];
            let retention = self.backend.bounds.pools[life_cycle].retention;
            let stale = retention.stale(sequence.computed as u32, block_tokens);
            let mut given: Vec<BlockId> = Vec::new();
            if self.releases && !stale.is_empty() {
                given.extend(table.blocks.drain(..(stale.end - table.out.end) as usize));
                table.out = stale;
            }
            given.iter().for_each(|&block| self.spoil(life_cycle, block));
            self.free[life_cycle].extend(given);
            let table = &mut sequence.tables[life_cycle];
            while table.len() < end.div_ceil(block_tokens.get() as usize) {
                table.blocks.push(self.free[life_cycle].pop().expect("the pool is large enough"));
            }
        }
    }

    /// Computes the next tokens of each sequence in one step; the logits behind them.
    fn advance(&mut self, sequences: &mut [Sequence], count: usize) -> Vec<Bits> {
        let slices = sequences.iter_mut().map(|sequence| {
            let (start, end) = (sequence.computed, sequence.tokens.len().min(sequence.computed + count));
            self.make_room(sequence, end);
            sequence.computed = end;
            Slice { tables: sequence.tables.clone(), ..slice(&sequence.tokens, start, end, &[]) }
        });
        let step = Step { slices: slices.collect(), ..Step::default() };
        logits(&mut self.backend, &step)
    }
}

fn load(tiny: &TinyModel, arithmetic: Arithmetic) -> Arc<Model> {
    Arc::new(Model::load(&tiny.gguf().into(), arithmetic).unwrap())
}

/// Models whose first life cycle has a window, and whose second has none.
fn windowed() -> [TinyModel; 3] {
    let gemma = TinyModel { family: Family::Gemma3, context: 1024, ..TinyModel::default() };
    [
        TinyModel { layers: 6, kv_heads: 1, window: 13, pattern: 3, tied: true, seed: 4, ..gemma.clone() },
        TinyModel { window: 1, head_dim: 24, kind: TensorType::F32, seed: 5, ..gemma.clone() },
        TinyModel { window: 70, ..gemma },
    ]
}

/// Chunks of a prompt, then single tokens.
const CHUNKS: [usize; 14] = [7, 41, 1, 1, 29, 64, 3, 1, 1, 1, 1, 1, 1, 1];

/// Logits of two sequences that run beside each other, chunk by chunk, in so many blocks; and the most blocks that one had
/// in each life cycle.
fn answers(rank: &mut Rank, (tokens, chunks): (usize, &[usize])) -> (Vec<Vec<Bits>>, Vec<usize>) {
    let vocabulary = rank.backend.model().config().vocabulary;
    let mut both = [1, 2].map(|seed| Sequence::new(super::tokens(tokens, seed, 0, vocabulary)));
    let mut most = vec![0; rank.free.len()];
    let each = chunks.iter().map(|&chunk| {
        let bits = rank.advance(&mut both, chunk);
        for (most, table) in most.iter_mut().zip(&both[1].tables) {
            *most = table.blocks.len().max(*most);
        }
        bits
    });
    (each.collect(), most)
}

#[test]
fn blocks_out_of_the_window_are_given_to_others_and_no_bit_changes() {
    for (tiny, arithmetic) in
        windowed().iter().flat_map(|tiny| [Arithmetic::Exact, Arithmetic::Int8].map(|a| (tiny, a)))
    {
        let model = load(tiny, arithmetic);
        let length: usize = CHUNKS.iter().sum();
        for block_tokens in [1, 5, 8, 16, 32] {
            let whole = 2 * (length as u32).div_ceil(block_tokens);
            let mut keeping = Rank::new(&model, (&[whole, whole], block_tokens), false);
            let (right, all) = answers(&mut keeping, (length, &CHUNKS));
            assert!(right.iter().flatten().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
            // What the longest chunk and the window before it need.
            let few = 2 * ((64 + tiny.window as u32).div_ceil(block_tokens) + 1);
            let mut releasing = Rank::new(&model, (&[few.min(whole), whole], block_tokens), true);
            let (found, most) = answers(&mut releasing, (length, &CHUNKS));
            assert!(found == right, "{arithmetic}, {tiny:?}, blocks of {block_tokens}");
            assert_eq!(most[1], all[1]);
            assert!(most[0] < all[0] || tiny.window == 70, "{} of {} blocks", most[0], all[0]);
        }
    }
}

#[test]
fn windows_move_on_through_segments_of_long_contexts() {
    let tiny = TinyModel { window: 100, ..windowed()[2].clone() };
    let chunks = [300, 1, 1, 211, 1, 140, 1, 1, 97, 1];
    for arithmetic in [Arithmetic::Exact, Arithmetic::Int8] {
        let model = load(&tiny, arithmetic);
        let length = chunks.iter().sum();
        let (right, _) = answers(&mut Rank::new(&model, (&[96, 96], 16), false), (length, &chunks));
        let (found, most) = answers(&mut Rank::new(&model, (&[48, 96], 16), true), (length, &chunks));
        assert!(found == right, "{arithmetic}");
        // 211 tokens, the 99 before them, and a part of a block at each end.
        assert_eq!(most, [21, 48]);
    }
}

#[test]
fn a_sequence_that_goes_on_from_copied_blocks_gives_the_bits_of_one_that_computed_them() {
    for (tiny, arithmetic) in
        windowed().iter().flat_map(|tiny| [Arithmetic::Exact, Arithmetic::Int8].map(|a| (tiny, a)))
    {
        let model = load(tiny, arithmetic);
        let vocabulary = model.config().vocabulary;
        // The first 20 tokens are the same: two blocks and a half.
        let [ours, theirs] = [1, 2].map(|seed| tokens(40, seed, 20, vocabulary));
        let right = [&ours, &theirs].map(|tokens| alone(&mut backend(&model, 1), tokens));
        let mut rank = Rank::new(&model, (&[64, 64], BLOCK_TOKENS), false);
        let of = |blocks: &[u32]| Table::whole(blocks.iter().map(|&block| BlockId(block)).collect());
        let first = Slice { tables: vec![of(&[1, 2, 3]), of(&[9, 8, 7])], ..slice(&ours, 0, 20, &[]) };
        logits(&mut rank.backend, &Step { slices: vec![first], ..Step::default() });
        // The half block by a detour in one life cycle, and straight in the other.
        let copy = |life_cycle, from, to| BlockCopy { life_cycle, from: BlockId(from), to: BlockId(to) };
        let copies = vec![copy(0, 3, 40), copy(1, 7, 41), copy(0, 40, 42), copy(0, 2, 40)];
        let our_rest = Slice { tables: vec![of(&[1, 2, 3, 4, 5]), of(&[9, 8, 7, 6, 5])], ..slice(&ours, 20, 40, &[]) };
        let their_tables = vec![of(&[1, 40, 42, 50, 51]), of(&[9, 8, 41, 50, 51])];
        let their_rest = Slice { tables: their_tables, ..slice(&theirs, 20, 40, &[]) };
        let found = logits(&mut rank.backend, &Step { copies, slices: vec![our_rest, their_rest] });
        assert!(found == right, "{arithmetic}, {tiny:?}");
    }
}

#[test]
fn a_life_cycle_has_blocks_of_its_own_number() {
    let model = load(&windowed()[0], Arithmetic::Exact);
    let mut rank = Rank::new(&model, (&[2, 5], 8), true);
    assert_eq!(rank.backend.bounds().pools.iter().map(|pool| pool.blocks).collect::<Vec<_>>(), [2, 5]);
    let ours = tokens(8, 1, 0, model.config().vocabulary);
    let refusal = |rank: &mut Rank, blocks: [u32; 2]| {
        let tables = blocks.map(|block| Table::whole(vec![BlockId(block)])).to_vec();
        let slice = Slice { tables, ..slice(&ours, 0, 8, &[]) };
        rank.backend
            .step(&Step { slices: vec![slice], ..Step::default() }, &mut Vec::new())
            .err()
            .map(|e| e.to_string())
    };
    assert_eq!(refusal(&mut rank, [1, 4]), None);
    let why = "slice 0 has a malformed table for life cycle 0: it names block 2, the pool has 2";
    assert_eq!(refusal(&mut rank, [2, 4]).as_deref(), Some(why));
    assert!(refusal(&mut rank, [1, 5]).is_some_and(|why| why.ends_with("block 5, the pool has 5")));
}
