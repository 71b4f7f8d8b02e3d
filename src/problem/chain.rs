//! The rewrites that lead from an earlier state, the anchor, to the one that a backward is about.

use super::rewrite_read::{Link, RewriteRead};
use super::sizes::Sizes;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

impl Link {
    /// Groups a list of tensors, four of each rewrite.
    pub fn from_tensors(tensors: Vec<Tensor>) -> Result<Vec<Link>> {
        if !tensors.len().is_multiple_of(4) {
            return Err(Error::Argument(format!(
                "`chain` must hold direction, value, gate and stats of each rewrite, got {} tensors",
                tensors.len()
            )));
        }
        let (mut links, mut tensors) = (Vec::with_capacity(tensors.len() / 4), tensors.into_iter());
        while let (Some(direction), Some(value), Some(gate), Some(stats)) =
            (tensors.next(), tensors.next(), tensors.next(), tensors.next())
        {
            links.push(Link { direction, value, gate, stats });
        }
        Ok(links)
    }
}

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
