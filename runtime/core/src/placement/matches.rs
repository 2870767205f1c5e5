//! Prefix matches of a batch.

use crate::ids::RequestNumber;
use hashbrown::HashTable;

/// Prefix matches of the requests of a batch.
pub trait Matches {
    /// Cached prompt tokens by dense rank; ranks past the row's end have none.
    fn row(&self, request: RequestNumber) -> &[u32];
}

/// For routers that look at no matches.
pub struct NoMatches;

impl Matches for NoMatches {
    fn row(&self, _: RequestNumber) -> &[u32] {
        &[]
    }
}

impl Matches for std::collections::BTreeMap<RequestNumber, Vec<u32>> {
    fn row(&self, request: RequestNumber) -> &[u32] {
        self.get(&request).map_or(&[], Vec::as_slice)
    }
}

/// What the ranks reported of the requests that a round named; kept between rounds so that its buffers are allocated once.
#[derive(Clone, Debug, Default)]
pub struct MatchTable {
    ranks: usize,
    requests: Vec<RequestNumber>,
    /// A row of `ranks` words a request.
    rows: Vec<u32>,
    by_number: HashTable<u32>,
}

impl MatchTable {
    /// Forgets all matches; what is set next is of a view of `ranks` ranks.
    pub fn reset(&mut self, ranks: u32) {
        self.ranks = ranks as usize;
        self.requests.clear();
        self.rows.clear();
        self.by_number.clear();
    }

    /// `tokens` of the request's prompt are cached on `rank`. What ranks outside the view report is ignored.
    pub fn set(&mut self, request: RequestNumber, rank: u32, tokens: u32) {
        let rank = rank as usize;
        if rank >= self.ranks {
            return;
        }
        let known = self.place(request);
        let place = known.unwrap_or(self.requests.len());
        if known.is_none() {
            self.requests.push(request);
            self.rows.resize(self.requests.len() * self.ranks, 0);
            let requests = &self.requests;
            self.by_number.insert_unique(request.spread(), place as u32, |at| requests[*at as usize].spread());
        }
        self.rows[place * self.ranks + rank] = tokens;
    }

    fn place(&self, request: RequestNumber) -> Option<usize> {
        let found = self.by_number.find(request.spread(), |at| self.requests[*at as usize] == request);
        found.map(|at| *at as usize)
    }
}

impl Matches for MatchTable {
    fn row(&self, request: RequestNumber) -> &[u32] {
        self.place(request).map_or(&[], |place| &self.rows[place * self.ranks..][..self.ranks])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_by_request_and_rank_until_the_next_reset() {
        let mut matches = MatchTable::default();
        matches.reset(3);
        let numbers = [5, 9, u64::MAX].map(RequestNumber);
        for (rank, number) in numbers.into_iter().enumerate() {
            matches.set(number, rank as u32, 10 + rank as u32);
            matches.set(number, 3, 99);
        }
        matches.set(numbers[0], 2, 7);
        assert_eq!(numbers.map(|number| matches.row(number).to_vec()), [[10, 0, 7], [0, 11, 0], [0, 0, 12]]);
        assert!(matches.row(RequestNumber(6)).is_empty());
        matches.reset(1);
        assert!(matches.row(numbers[0]).is_empty());
    }
}
