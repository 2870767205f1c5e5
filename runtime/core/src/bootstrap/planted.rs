//! Mistakes that tests plant in the machine, to see that they are found. A product has none.

/// What is planted: nothing, outside tests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Planted {
    #[cfg(test)]
    pub(super) mistake: Option<Mistake>,
}

#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mistake {
    /// Bootstrap from some of the names: a majority of them.
    SomeNames,
    /// Only newer incarnations count as gone, not those that live on in another cluster.
    NewerAlone,
}

#[cfg(test)]
impl Planted {
    pub(super) fn some_names(&self) -> bool {
        self.mistake == Some(Mistake::SomeNames)
    }

    pub(super) fn newer_alone(&self) -> bool {
        self.mistake == Some(Mistake::NewerAlone)
    }
}

#[cfg(not(test))]
impl Planted {
    pub(super) fn some_names(&self) -> bool {
        false
    }

    pub(super) fn newer_alone(&self) -> bool {
        false
    }
}
