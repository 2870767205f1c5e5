use super::halves::HalfPool;
use super::*;
use half::f16;
use std::ops::Range;

const SHAPE: BlockShape = BlockShape { kv_heads: 2, head_dim: 2, block_tokens: 4 };

/// The keys and values of a token: what each holds says where it belongs.
fn row(position: usize) -> ([f32; 4], [f32; 4]) {
    let number = |at: usize| (position * 16 + at) as f32;
    ([0, 1, 2, 3].map(number), [8, 9, 10, 11].map(number))
}

fn blocks(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().map(|&block| BlockId(block)).collect()
}

/// Checks the keys and values of a position in both kinds of pools.
fn holds((exact, halves): (&KvPool, &HalfPool), (layer, table): (usize, &Table), position: usize) {
    let (keys, values) = row(position);
    for head in 0..2 {
        let found = exact.head(layer, head, table).run(position, position + 1);
        assert_eq!(found, (&keys[head * 2..][..2], &values[head * 2..][..2]), "position {position}");
        let half = halves.head(layer, head, table);
        let at = |numbers: &[u16], at: usize| f16::from_bits(numbers[at]).to_f32();
        let (half_keys, half_values) = (half.keys(position), half.values(position));
        assert_eq!([at(half_keys, 0), at(half_keys, half.key_stride())], keys[head * 2..][..2]);
        assert_eq!([at(half_values, 0), at(half_values, 1)], values[head * 2..][..2]);
    }
}

fn written(layer: usize, table: &Table, positions: Range<usize>) -> (KvPool, HalfPool) {
    let (mut exact, mut halves) = (KvPool::new(SHAPE, 3, 8).unwrap(), HalfPool::new(SHAPE, 3, 8).unwrap());
    for position in positions {
        let (keys, values) = row(position);
        exact.write(layer, table, position, (&keys, &values));
        // SAFETY: one position after the other.
        unsafe { halves.writer(layer).put(table, position, (&keys, &values)) };
    }
    (exact, halves)
}

#[test]
fn positions_on_both_sides_of_the_blocks_that_are_out_have_their_own() {
    let whole = Table::whole(blocks(&[5, 2, 7, 0, 3, 1, 6]));
    let (exact, halves) = written(1, &whole, 0..28);
    for out in [0..0, 5..5, 0..3, 1..4, 2..6, 6..7] {
        let kept = |ordinal: &usize| !out.contains(&(*ordinal as u32));
        let left = (0..7).filter(kept).map(|ordinal| whole.blocks[ordinal]).collect();
        let table = Table { out: out.clone(), blocks: left };
        for position in (0..28).filter(|position| kept(&(position / 4))) {
            holds((&exact, &halves), (1, &table), position);
        }
        // What is written by such a table is where the whole one has it.
        let positions = if out.end == 7 { 0..24 } else { out.end as usize * 4..28 };
        let (exact, halves) = written(1, &table, positions.clone());
        positions.for_each(|position| holds((&exact, &halves), (1, &whole), position));
    }
}

#[test]
fn a_copied_block_has_the_contents_of_the_other_in_all_layers() {
    let table = Table::whole(blocks(&[5, 2]));
    for layer in 0..3 {
        let (mut exact, mut halves) = written(layer, &table, 0..8);
        exact.copy(BlockId(2), BlockId(7));
        halves.copy(BlockId(2), BlockId(7));
        let copied = Table::whole(blocks(&[5, 7]));
        (0..8).for_each(|position| holds((&exact, &halves), (layer, &copied), position));
        (0..8).for_each(|position| holds((&exact, &halves), (layer, &table), position));
        // Over what was there.
        exact.copy(BlockId(5), BlockId(2));
        halves.copy(BlockId(5), BlockId(2));
        (0..4).for_each(|position| holds((&exact, &halves), (layer, &Table::whole(blocks(&[2]))), position));
    }
}
