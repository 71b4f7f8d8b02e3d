//! Choices made by hand: tests reach every plan with them, tuning compares them.

use super::residency::{RESIDENCIES, Residency};

/// The choices that are not left to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    pub cluster: Option<usize>,
    pub threads: Option<usize>,
    pub features: Option<usize>,
    pub keep_in_registers: Option<bool>,
    pub window: Option<Residency>,
    pub sums: Option<Residency>,
    /// of sums that have a kernel of their own
    pub separate_sums: Option<Residency>,
    pub stages: Option<usize>,
    pub load_ahead: Option<usize>,
    pub blocks: Option<usize>,
    pub chunk: Option<usize>,
}

const NAMES: &str = "CLUSTER, THREADS, FEATURES, KEEP_IN_REGISTERS, WINDOW, SUMS, SEPARATE_SUMS, STAGES, LOAD_AHEAD, BLOCKS \
                     or CHUNK";

impl Overrides {
    /// From words such as `CLUSTER=2 STAGES=0`: the names of a plan's macros, `SEPARATE_SUMS` and `CHUNK`. Fails with the
    /// end of a sentence; the caller begins it with the words' origin.
    pub fn parse(words: &str) -> Result<Overrides, String> {
        words.split_whitespace().try_fold(Overrides::default(), |mut overrides, word| {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let value = value
                .parse()
                .map_err(|_| format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"))?;
            overrides.set(name, value).map(|()| overrides)
        })
    }

    fn set(&mut self, name: &str, value: usize) -> Result<(), String> {
        let within = |least: usize, most: usize| match (least..=most).contains(&value) {
            true => Ok(Some(value)),
            false => Err(format!("must have {name} from {least} to {most}, got {value}")),
        };
        let residency = |most| within(0, most).map(|_| Some(RESIDENCIES[value]));
        match name {
            "CLUSTER" => self.cluster = within(1, 8)?,
            "THREADS" if !value.is_multiple_of(32) => {
                return Err(format!("must have THREADS in warps of 32, got {value}"));
            }
            "THREADS" => self.threads = within(32, 1024)?,
            "FEATURES" => self.features = within(1, 8)?,
            "KEEP_IN_REGISTERS" => self.keep_in_registers = within(0, 1)?.map(|kept| kept != 0),
            "WINDOW" => self.window = residency(2)?,
            "SUMS" => self.sums = residency(3)?,
            "SEPARATE_SUMS" => self.separate_sums = residency(2)?,
            "STAGES" => self.stages = within(0, 2)?,
            "LOAD_AHEAD" => self.load_ahead = within(0, 2)?,
            "BLOCKS" => self.blocks = within(1, 32)?,
            "CHUNK" => self.chunk = within(1, usize::MAX)?,
            _ => return Err(format!("must name {NAMES}, got {name:?}")),
        }
        Ok(())
    }
}

impl Overrides {
    /// Every override as a word, and alone.
    pub(super) fn each(&self) -> Vec<(String, Overrides)> {
        let residency = |residency: Option<Residency>| residency.map(|residency| residency as usize);
        let values = [
            ("CLUSTER", self.cluster),
            ("THREADS", self.threads),
            ("FEATURES", self.features),
            ("KEEP_IN_REGISTERS", self.keep_in_registers.map(usize::from)),
            ("WINDOW", residency(self.window)),
            ("SUMS", residency(self.sums)),
            ("SEPARATE_SUMS", residency(self.separate_sums)),
            ("STAGES", self.stages),
            ("LOAD_AHEAD", self.load_ahead),
            ("BLOCKS", self.blocks),
        ];
        let alone = |(name, value): (&str, Option<usize>)| {
            let word = format!("{name}={}", value?);
            let alone = Overrides::parse(&word).ok()?;
            Some((word, alone))
        };
        values.into_iter().filter_map(alone).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_override_of_a_plan_comes_back_as_a_word() {
        for name in NAMES.split([',', ' ']).filter(|name| !matches!(*name, "" | "or" | "CHUNK")) {
            let word = format!("{name}={}", if name == "THREADS" { 32 } else { 1 });
            let overrides = Overrides::parse(&word).unwrap();
            assert_eq!(overrides.each(), [(word, overrides)]);
        }
    }

    #[test]
    fn words_become_choices() {
        assert_eq!(Overrides::parse(" "), Ok(Overrides::default()));
        let overrides = Overrides::parse("CLUSTER=2  KEEP_IN_REGISTERS=0 SUMS=3").unwrap();
        let expected = Overrides {
            cluster: Some(2),
            keep_in_registers: Some(false),
            sums: Some(Residency::SeparateKernel),
            ..Overrides::default()
        };
        assert_eq!(overrides, expected);
        for (number, residency) in RESIDENCIES.into_iter().enumerate() {
            assert_eq!(residency as usize, number);
        }
    }

    #[test]
    fn other_words_are_refused() {
        let refused = |words| Overrides::parse(words).unwrap_err();
        assert_eq!(refused("STAGES=3"), "must have STAGES from 0 to 2, got 3");
        assert_eq!(refused("THREADS=48"), "must have THREADS in warps of 32, got 48");
        assert_eq!(refused("WINDOW=3"), "must have WINDOW from 0 to 2, got 3");
        assert_eq!(refused("SLICES=3"), format!("must name {NAMES}, got \"SLICES\""));
        for word in ["STAGES", "STAGES=", "STAGES=-1", "STAGES:1"] {
            assert_eq!(refused(word), format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"));
        }
    }
}
