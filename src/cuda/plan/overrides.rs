//! Choices made by hand: tests reach every plan with them, benchmarks/gpu compares them.

use super::plan::{Plan, Residency};

type Make = fn(Plan, usize) -> Plan;

/// The choices: their names in `DDL_PLAN`, which are those of the macros, their least and greatest values, and how a plan
/// makes them.
const CHOICES: [(&str, usize, usize, Make); 12] = [
    ("CLUSTER", 1, 8, |plan, cluster| Plan { cluster, ..plan }),
    ("THREADS", 32, 1024, |plan, threads| Plan { threads, ..plan }),
    ("FEATURES", 1, 8, |plan, features| Plan { features, ..plan }),
    ("KEEP_IN_REGISTERS", 0, 1, |plan, keep| Plan { keep_in_registers: keep != 0, ..plan }),
    ("WINDOW", 0, 2, |plan, place| Plan { window: Residency::ALL[place], ..plan }),
    ("SUMS", 0, 3, |plan, place| Plan { sums: Residency::ALL[place], ..plan }),
    ("SEPARATE_SUMS", 0, 2, |plan, place| Plan { sums: Residency::ALL[place], ..plan }), // SUMS of parameters_bwd
    ("STAGES", 0, 2, |plan, stages| Plan { stages, ..plan }),
    ("LOAD_AHEAD", 0, 2, |plan, load_ahead| Plan { load_ahead, ..plan }),
    ("BLOCKS", 1, 32, |plan, blocks| Plan { blocks, ..plan }),
    ("ORDER", 0, 1, |plan, _| plan), // 0: a block's tokens are neighbours, 1: blocks take turns; no macro
    ("CHUNK", 1, usize::MAX, |plan, _| plan), // tokens of a block; no macro
];

/// A choice that a kernel may have: its name, and its usual values after the choices before it.
pub(super) type Choice<'a> = (bool, &'a str, &'a dyn Fn(&Plan) -> Vec<usize>);

/// The choices that are not left to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides([Option<usize>; CHOICES.len()]);

impl Overrides {
    /// From words such as `CLUSTER=2 STAGES=0`. Fails with the end of a sentence that begins with the words' origin.
    pub fn parse(words: &str) -> Result<Overrides, String> {
        let mut overrides = Overrides::default();
        for word in words.split_whitespace() {
            let choice =
                word.split_once('=').and_then(|(name, value)| Some((index(name)?, value.parse().ok()?)));
            let (choice, value) =
                choice.ok_or_else(|| format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"))?;
            let (name, least, most, _) = CHOICES[choice];
            if !(least..=most).contains(&value) {
                return Err(format!("must have {name} from {least} to {most}, got {value}"));
            }
            overrides.0[choice] = Some(value);
        }
        Ok(overrides)
    }

    pub fn get(&self, name: &str) -> Option<usize> {
        self.0[index(name)?]
    }

    pub(super) fn without(mut self, names: &[&str]) -> Overrides {
        names.iter().filter_map(|name| index(name)).for_each(|choice| self.0[choice] = None);
        self
    }

    /// Whether every macro is left to the planner.
    pub(super) fn no_macro(&self) -> bool {
        self.without(&["ORDER", "CHUNK"]) == Overrides::default()
    }

    /// The plans that make the choices in every usual way, or as it was chosen by hand.
    pub(super) fn vary(&self, first: Plan, choices: &[Choice]) -> Vec<Plan> {
        choices.iter().filter(|(has, ..)| *has).fold(vec![first], |plans, (_, name, usual)| {
            let make = CHOICES[index(name).expect("a name of the list")].3;
            let values = |plan: &Plan| self.get(name).map_or_else(|| usual(plan), |value| vec![value]);
            plans.iter().flat_map(|plan| values(plan).into_iter().map(|value| make(*plan, value))).collect()
        })
    }
}

/// Where a choice is in the list.
fn index(name: &str) -> Option<usize> {
    CHOICES.iter().position(|(known, ..)| *known == name)
}
