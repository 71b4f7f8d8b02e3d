//! Choices made by hand: tests reach every plan with them, tuning compares them.

use super::plan::{Plan, Residency};

/// A choice: its name in `DDL_PLAN`, which is its macro's, its least and its greatest value, and how a plan makes it.
type Choice = (&'static str, usize, usize, fn(&mut Plan, usize));

const CHOICES: [Choice; 12] = [
    ("CLUSTER", 1, 8, |plan, value| plan.cluster = value),
    ("THREADS", 32, 1024, |plan, value| plan.threads = value),
    ("FEATURES", 1, 8, |plan, value| plan.features = value),
    ("KEEP_IN_REGISTERS", 0, 1, |plan, value| plan.keep_in_registers = value != 0),
    ("WINDOW", 0, 2, |plan, value| plan.window = Residency::ALL[value]),
    ("SUMS", 0, 3, |plan, value| plan.sums = Residency::ALL[value]),
    ("SEPARATE_SUMS", 0, 2, |plan, value| plan.sums = Residency::ALL[value]), // SUMS of parameters_bwd
    ("STAGES", 0, 2, |plan, value| plan.stages = value),
    ("LOAD_AHEAD", 0, 2, |plan, value| plan.load_ahead = value),
    ("BLOCKS", 1, 32, |plan, value| plan.blocks = value),
    ("ORDER", 0, 1, |_, _| ()), // 0: a block's tokens are neighbours, 1: blocks take turns; no macro
    ("CHUNK", 1, usize::MAX, |_, _| ()), // tokens of a block; no macro
];

/// The choices that are not left to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides([Option<usize>; CHOICES.len()]);

impl Overrides {
    /// From words such as `CLUSTER=2 STAGES=0`. Fails with the end of a sentence that begins with the words' origin.
    pub fn parse(words: &str) -> Result<Overrides, String> {
        let mut overrides = Overrides::default();
        for word in words.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let no_word = |_| format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}");
            let value: usize = value.parse().map_err(no_word)?;
            let names = CHOICES.map(|(name, ..)| name);
            let Some(choice) = names.iter().position(|known| *known == name) else {
                let names = names.join(", ").replace(", CHUNK", " or CHUNK");
                return Err(format!("must name {names}, got {name:?}"));
            };
            let (_, least, most, _) = CHOICES[choice];
            if name == "THREADS" && !value.is_multiple_of(32) {
                return Err(format!("must have THREADS in warps of 32, got {value}"));
            }
            if !(least..=most).contains(&value) {
                return Err(format!("must have {name} from {least} to {most}, got {value}"));
            }
            overrides.0[choice] = Some(value);
        }
        Ok(overrides)
    }

    pub fn get(&self, name: &str) -> Option<usize> {
        self.0[index(name)]
    }

    /// All but one choice.
    pub fn without(mut self, name: &str) -> Overrides {
        self.0[index(name)] = None;
        self
    }

    /// A plan with each of the usual values of a choice, or with the one that was made by hand.
    pub(super) fn vary(&self, plan: &Plan, name: &str, usual: Vec<usize>) -> Vec<Plan> {
        let values = self.get(name).map_or(usual, |value| vec![value]);
        let mut plans = vec![*plan; values.len()];
        plans.iter_mut().zip(values).for_each(|(plan, value)| CHOICES[index(name)].3(plan, value));
        plans
    }

    /// The words that it was parsed from.
    pub(super) fn words(&self) -> String {
        let words =
            CHOICES.iter().zip(self.0).filter_map(|((name, ..), value)| Some(format!("{name}={}", value?)));
        words.collect::<Vec<_>>().join(" ")
    }
}

/// Where a choice is in the list.
fn index(name: &str) -> usize {
    CHOICES.iter().position(|(known, ..)| *known == name).expect("a name of the list")
}
