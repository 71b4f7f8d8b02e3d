//! A plan as macros.

use super::plan::Plan;

impl Plan {
    /// The macros that the plan decides.
    pub fn defines(&self) -> [(&'static str, String); 10] {
        [
            ("CLUSTER", self.cluster.to_string()),
            ("THREADS", self.threads.to_string()),
            ("FEATURES", self.features.to_string()),
            ("ALIGN", self.align.to_string()),
            ("KEEP_IN_REGISTERS", u8::from(self.keep_in_registers).to_string()),
            ("WINDOW", (self.window as u8).to_string()),
            ("SUMS", (self.sums as u8).to_string()),
            ("STAGES", self.stages.to_string()),
            ("LOAD_AHEAD", self.load_ahead.to_string()),
            ("BLOCKS", self.blocks.to_string()),
        ]
    }
}
