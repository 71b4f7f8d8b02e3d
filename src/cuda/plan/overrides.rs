//! Choices made by hand: tests reach every plan with them, tuning compares them.

use std::ops::RangeInclusive;

/// The choices that a plan leaves open, in the order of `CHOICES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Cluster,
    Threads,
    Features,
    KeepInRegisters,
    Window,
    Sums,
    /// of sums that have a kernel of their own
    SeparateSums,
    Stages,
    LoadAhead,
    Blocks,
    /// tokens of a block; no macro
    Chunk,
}

/// Each choice's name in `DDL_PLAN`, which is its macro's, and its values.
const CHOICES: [(&str, RangeInclusive<usize>); 11] = [
    ("CLUSTER", 1..=8),
    ("THREADS", 32..=1024),
    ("FEATURES", 1..=8),
    ("KEEP_IN_REGISTERS", 0..=1),
    ("WINDOW", 0..=2),
    ("SUMS", 0..=3),
    ("SEPARATE_SUMS", 0..=2),
    ("STAGES", 0..=2),
    ("LOAD_AHEAD", 0..=2),
    ("BLOCKS", 1..=32),
    ("CHUNK", 1..=usize::MAX),
];

/// The choices that are not left to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides([Option<usize>; CHOICES.len()]);

impl Overrides {
    /// From words such as `CLUSTER=2 STAGES=0`. Fails with the end of a sentence; the caller begins it with the words'
    /// origin.
    pub fn parse(words: &str) -> Result<Overrides, String> {
        words.split_whitespace().try_fold(Overrides::default(), |mut overrides, word| {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let value: usize = value
                .parse()
                .map_err(|_| format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"))?;
            let Some(choice) = CHOICES.iter().position(|(known, _)| *known == name) else {
                let names = CHOICES.map(|(name, _)| name).join(", ");
                return Err(format!("must name {}, got {name:?}", names.replace(", CHUNK", " or CHUNK")));
            };
            let (least, most) = (CHOICES[choice].1.start(), CHOICES[choice].1.end());
            match value {
                _ if choice == Choice::Threads as usize && !value.is_multiple_of(32) => {
                    return Err(format!("must have THREADS in warps of 32, got {value}"));
                }
                _ if !CHOICES[choice].1.contains(&value) => {
                    return Err(format!("must have {name} from {least} to {most}, got {value}"));
                }
                _ => overrides.0[choice] = Some(value),
            }
            Ok(overrides)
        })
    }

    pub fn get(&self, choice: Choice) -> Option<usize> {
        self.0[choice as usize]
    }

    /// All but one choice.
    pub fn without(mut self, choice: Choice) -> Overrides {
        self.0[choice as usize] = None;
        self
    }

    /// Every override of a plan as a word, and alone.
    pub(super) fn each(&self) -> Vec<(String, Overrides)> {
        let alone = |choice: usize| {
            let mut alone = Overrides::default();
            alone.0[choice] = self.0[choice];
            Some((format!("{}={}", CHOICES[choice].0, self.0[choice]?), alone))
        };
        (0..Choice::Chunk as usize).filter_map(alone).collect()
    }
}
