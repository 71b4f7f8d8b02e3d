//! The rewrites that lead from an earlier state, the anchor, to the one that a backward is about.

use super::rewrite_read::{Link, RewriteRead};
use super::sizes::Sizes;
use crate::error::{Error, Result};

impl RewriteRead {
    /// Takes the rewrites that lead from the state, an anchor, to the one that is meant.
    pub fn with_chain(mut self, chain: Vec<Link>) -> Result<RewriteRead> {
        let Sizes { d, m, .. } = self.sizes;
        for link in &chain {
            let Some(rewrite) = &self.rewrite else {
                return Err(Error::Argument("`chain` must come with a rewrite, got none".into()));
            };
            let Link { direction, value, gate, stats } = link;
            self.check_stored(direction, &self.rewrites.and(&[d]))?;
            direction.expect_dtype(&[rewrite.direction.dtype])?;
            self.check_gate(value, &self.rewrites.and(&[m]))?;
            self.check_gate(gate, &self.rewrites.and(&[]))?;
            self.check_gate(stats, &[self.rewrites.stats(m)])?;
        }
        self.chain = chain;
        Ok(self)
    }
}
