use super::{CLUSTERED, LARGE, SMALL, specialisation};
use crate::cuda::kernel::*;
use crate::cuda::plan::{Limits, Overrides, Plan};
use crate::tensor::Dtype;
use std::io::Write;

pub fn cases() -> Vec<(String, Specialisation, Limits)> {
    let sm80 = Limits {
        multiprocessors: 108,
        shared_per_block: 163 << 10,
        shared_per_multiprocessor: 164 << 10,
        ..LARGE
    };
    let sm120 = Limits { blocks_per_multiprocessor: 24, cluster: 8, ..SMALL };
    let mut all = Vec::new();
    for (arch, limits) in [("sm_80", sm80), ("sm_90", CLUSTERED), ("sm_120", sm120)] {
        for kernel in [
            Kernel::Forward,
            Kernel::Backward,
            Kernel::Parameters,
            Kernel::ExpandForward,
            Kernel::ExpandBackward,
        ] {
            for d in [384, 512, 768, 1024, 1280, 1600, 2048, 4096, 8192] {
                for m in [1, 2, 4, 8, 16] {
                    for read in [Compress::None, Compress::Identity, Compress::Channel, Compress::Token] {
                        for (stored, dtype, params) in [
                            ("bf16", Dtype::Bf16, Dtype::F32),
                            ("bf16w", Dtype::Bf16, Dtype::Bf16),
                            ("f32", Dtype::F32, Dtype::F32),
                        ] {
                            let mut s = specialisation(
                                kernel,
                                d,
                                m,
                                if read == Compress::Token { 4 } else { 1 },
                                dtype,
                            );
                            s.compress = read;
                            if (read == Compress::Identity) && m > 1 {
                                continue;
                            }
                            if kernel.expands() {
                                if !matches!(read, Compress::None | Compress::Token) {
                                    continue;
                                }
                                s.rewrite = false;
                                s.parts = Parts::default();
                                s.sums = ParameterSums {
                                    compress: read == Compress::Token,
                                    ..ParameterSums::default()
                                };
                                s.types.compress = params;
                            } else {
                                if read == Compress::None {
                                    if kernel == Kernel::Parameters {
                                        continue;
                                    }
                                    s.parts = Parts::default();
                                    s.sums = ParameterSums::default();
                                }
                                if read == Compress::Identity {
                                    s.sums.compress = false;
                                }
                                s.types.compress = params;
                                s.types.norm = params;
                                s.types.gate = params;
                                s.types.value = params;
                            }
                            all.push((format!("{arch} {kernel:?} {d} {m} {read:?} {stored}"), s, limits));
                        }
                    }
                }
            }
        }
    }
    all
}

#[test]
#[ignore]
fn dump_chosen() {
    let mut out = std::io::BufWriter::new(std::fs::File::create(std::env::var("DUMP").unwrap()).unwrap());
    for (name, s, limits) in cases() {
        let plan = Plan::new(&s, &limits, &Overrides::default()).unwrap();
        let f = super::super::footprint::Footprint::new(&s, &plan);
        let w: Vec<String> = plan.defines().into_iter().map(|(n, v)| format!("{n}={v}")).collect();
        writeln!(
            out,
            "{name} | {} | regs {} of {} shared {} moved {:?} params {}",
            w.join(" "),
            f.registers,
            limits.most_registers(plan.blocks * plan.threads),
            f.shared(),
            (f.device, f.l2, f.moved_shared),
            f.parameters
        )
        .unwrap();
    }
}
