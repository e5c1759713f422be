//! What one device computes, from PyTorch in float64: the cases in `tests/oracles`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ir::state::AdamW;
use serde_json::Value;

/// A case.
pub struct Oracle {
    /// Its folder.
    pub folder: PathBuf,
    /// case.json.
    pub case: Value,
    /// expected.safetensors.
    pub expected: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

/// Reads a case by its name.
pub fn read(name: &str) -> Oracle {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracles").join(name);
    let text = std::fs::read_to_string(folder.join("case.json")).expect("the case is in the repository");
    let case = serde_json::from_str(&text).expect("case.json is JSON");
    Oracle { expected: tensors(&folder.join("expected.safetensors")), folder, case }
}

/// The tensors of a file, as f64.
pub fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    file.tensors()
        .into_iter()
        .map(|(name, t)| {
            let eights = || t.data().chunks(8).map(eight);
            let data = if t.dtype() == safetensors::Dtype::F32 {
                t.data().chunks(4).map(|c| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]]))).collect()
            } else if t.dtype() == safetensors::Dtype::F64 {
                eights().map(f64::from_le_bytes).collect()
            } else if t.dtype() == safetensors::Dtype::I64 {
                eights().map(|c| i64::from_le_bytes(c) as f64).collect()
            } else {
                panic!("{name} is {:?}", t.dtype())
            };
            (name, (t.shape().to_vec(), data))
        })
        .collect()
}

fn eight(c: &[u8]) -> [u8; 8] {
    c.try_into().expect("eight bytes")
}

impl Oracle {
    /// The optimizer of the case.
    pub fn adamw(&self) -> AdamW {
        let (o, s) = (&self.case["optimizer"], &self.case["schedule"]);
        let number = |v: &Value| v.as_f64().expect("a number");
        AdamW {
            lr: number(&s["lr"]),
            min_lr: number(&s["min_lr"]),
            warmup: s["warmup_steps"].as_u64().expect("a count") as usize,
            steps: s["steps"].as_u64().expect("a count") as usize,
            beta1: number(&o["betas"][0]),
            beta2: number(&o["betas"][1]),
            eps: number(&o["eps"]),
            weight_decay: number(&o["weight_decay"]),
            clip: o["clip_global_norm"].as_f64(),
        }
    }

    /// A list of numbers of the case.
    pub fn numbers(&self, key: &str) -> Vec<f64> {
        self.case[key].as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
    }
}
