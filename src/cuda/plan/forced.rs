//! Choices made by hand: tests reach every plan with them, tuning compares them.

use super::Place;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    pub cluster: Option<usize>,
    pub threads: Option<usize>,
    pub features: Option<usize>,
    pub hold: Option<bool>,
    pub window: Option<Place>,
    pub sums: Option<Place>,
    /// of sums that are apart
    pub sums_apart: Option<Place>,
    pub stages: Option<usize>,
    pub blocks: Option<usize>,
    pub chunk: Option<usize>,
}

const NAMES: &str =
    "CLUSTER, THREADS, FEATURES, KEEP_IN_REGISTERS, WINDOW, SUMS, SEPARATE_SUMS, STAGES, BLOCKS or CHUNK";

impl Forced {
    /// From words such as `CLUSTER=2 STAGES=0`: the names of a plan's macros, `SEPARATE_SUMS` and `CHUNK`. Fails with the
    /// end of a sentence that begins with what the words are for.
    pub fn parse(words: &str) -> Result<Forced, String> {
        words.split_whitespace().try_fold(Forced::default(), |mut forced, word| {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let value = value
                .parse()
                .map_err(|_| format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"))?;
            forced.set(name, value).map(|()| forced)
        })
    }

    fn set(&mut self, name: &str, value: usize) -> Result<(), String> {
        let within = |least: usize, most: usize| match (least..=most).contains(&value) {
            true => Ok(Some(value)),
            false => Err(format!("must have {name} from {least} to {most}, got {value}")),
        };
        let place = |most| within(0, most).map(|_| Some(PLACES[value]));
        match name {
            "CLUSTER" => self.cluster = within(1, 8)?,
            "THREADS" if !value.is_multiple_of(32) => {
                return Err(format!("must have THREADS in warps of 32, got {value}"));
            }
            "THREADS" => self.threads = within(32, 1024)?,
            "FEATURES" => self.features = within(1, 8)?,
            "KEEP_IN_REGISTERS" => self.hold = within(0, 1)?.map(|hold| hold != 0),
            "WINDOW" => self.window = place(2)?,
            "SUMS" => self.sums = place(3)?,
            "SEPARATE_SUMS" => self.sums_apart = place(2)?,
            "STAGES" => self.stages = within(0, 2)?,
            "BLOCKS" => self.blocks = within(1, 32)?,
            "CHUNK" => self.chunk = within(1, usize::MAX)?,
            _ => return Err(format!("must name {NAMES}, got {name:?}")),
        }
        Ok(())
    }
}

/// By number.
const PLACES: [Place; 4] = [Place::Registers, Place::Shared, Place::Global, Place::Apart];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_choices() {
        assert_eq!(Forced::parse(" "), Ok(Forced::default()));
        let forced = Forced::parse("CLUSTER=2  KEEP_IN_REGISTERS=0 SUMS=3").unwrap();
        let expected =
            Forced { cluster: Some(2), hold: Some(false), sums: Some(Place::Apart), ..Forced::default() };
        assert_eq!(forced, expected);
        for (number, place) in PLACES.into_iter().enumerate() {
            assert_eq!(place as usize, number);
        }
    }

    #[test]
    fn other_words_are_refused() {
        let refused = |words| Forced::parse(words).unwrap_err();
        assert_eq!(refused("STAGES=3"), "must have STAGES from 0 to 2, got 3");
        assert_eq!(refused("THREADS=48"), "must have THREADS in warps of 32, got 48");
        assert_eq!(refused("WINDOW=3"), "must have WINDOW from 0 to 2, got 3");
        assert_eq!(refused("SLICES=3"), format!("must name {NAMES}, got \"SLICES\""));
        for word in ["STAGES", "STAGES=", "STAGES=-1", "STAGES:1"] {
            assert_eq!(refused(word), format!("must be words like CLUSTER=2 or STAGES=0, got {word:?}"));
        }
    }
}
