//! Clusters: what a plan is priced for. One level: every rank is alike, and so is every link.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A cluster of like devices and links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Its name.
    pub name: String,
    /// How many devices there are; none: as many as asked for.
    pub devices: Option<usize>,
    /// f32 FLOP/s of a rank.
    pub flops: f64,
    /// FLOP/s of a rank in products of bf16; none: no more than in f32.
    #[serde(default)]
    pub flops_bf16: Option<f64>,
    /// Bytes/s between a rank and its memory.
    pub memory_bandwidth: f64,
    /// Bytes of a rank's memory; none: not known.
    pub memory: Option<f64>,
    /// Seconds to start a kernel, or a collective.
    pub launch: f64,
    /// Seconds that a round of a collective waits.
    pub latency: f64,
    /// Bytes/s that a rank sends.
    pub bandwidth: f64,
}

/// A cluster that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Neither a known name nor a file.
    #[error("there is no cluster `{0}`: known are {1}; or name a RON file")]
    Unknown(String, String),
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// The file is no cluster.
    #[error("{0}:{1}: {2}")]
    Parse(PathBuf, usize, String),
    /// A figure that makes no sense.
    #[error("cluster {0}: `{1}` is {2}, but needs to be above 0")]
    Figure(String, &'static str, f64),
    /// A time that makes no sense.
    #[error("cluster {0}: `{1}` is {2}, but needs to be 0 seconds or more")]
    Wait(String, &'static str, f64),
    /// A device count that is none.
    #[error("cluster `{0}` reads NAME or NAME:GPUS, as in h100:8")]
    Devices(String),
    /// More ranks than devices.
    #[error("the mesh has {ranks} ranks, but cluster {cluster} has {devices} devices")]
    TooFew {
        /// Of the mesh.
        ranks: usize,
        /// Its name.
        cluster: String,
        /// What it has.
        devices: usize,
    },
}

const BUILT_IN: &[(&str, &str)] =
    &[("here", include_str!("../clusters/here.ron")), ("h100", include_str!("../clusters/h100.ron"))];

/// Reads `NAME`, `NAME:GPUS` or a file.
///
/// # Errors
/// What is wrong with it.
pub fn read(text: &str) -> Result<Cluster, ClusterError> {
    let path = Path::new(text);
    if text.ends_with(".ron") || path.is_file() {
        let file = std::fs::read_to_string(path).map_err(|e| ClusterError::Read(path.to_path_buf(), e))?;
        return parse(path, &file);
    }
    let (name, devices) = match text.split_once(':') {
        Some((name, n)) => {
            let n =
                n.parse().ok().filter(|n| *n > 0).ok_or_else(|| ClusterError::Devices(text.to_string()))?;
            (name, Some(n))
        }
        None => (text, None),
    };
    let Some((_, file)) = BUILT_IN.iter().find(|(n, _)| *n == name) else {
        let known = BUILT_IN.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
        return Err(ClusterError::Unknown(name.to_string(), known));
    };
    let cluster = parse(Path::new(name), file)?;
    Ok(Cluster { devices, ..cluster })
}

fn parse(path: &Path, text: &str) -> Result<Cluster, ClusterError> {
    let cluster: Cluster = ron::from_str(text)
        .map_err(|e| ClusterError::Parse(path.to_path_buf(), e.span.start.line, e.code.to_string()))?;
    let figures = [
        ("flops", cluster.flops),
        ("flops_bf16", cluster.rate(true)),
        ("memory_bandwidth", cluster.memory_bandwidth),
        ("memory", cluster.memory.unwrap_or(1.0)),
        ("bandwidth", cluster.bandwidth),
    ];
    let waits = [("launch", cluster.launch), ("latency", cluster.latency)];
    let wrong = figures.into_iter().find(|(_, x)| !(*x > 0.0 && x.is_finite()));
    let negative = waits.into_iter().find(|(_, x)| !(*x >= 0.0 && x.is_finite()));
    match (wrong, negative) {
        (Some((key, x)), _) => Err(ClusterError::Figure(cluster.name, key, x)),
        (None, Some((key, x))) => Err(ClusterError::Wait(cluster.name, key, x)),
        (None, None) => Ok(cluster),
    }
}

impl Cluster {
    /// FLOP/s of a rank, in products of bf16 or in anything else.
    pub fn rate(&self, bf16: bool) -> f64 {
        if bf16 { self.flops_bf16.unwrap_or(self.flops) } else { self.flops }
    }

    /// Whether it has a device for each rank.
    ///
    /// # Errors
    /// It has fewer.
    pub fn holds(&self, ranks: usize) -> Result<(), ClusterError> {
        match self.devices {
            Some(devices) if devices < ranks => {
                Err(ClusterError::TooFew { ranks, cluster: self.name.clone(), devices })
            }
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_clusters_read() {
        assert_eq!(read("h100:8").map(|c| c.devices).ok(), Some(Some(8)));
        assert!(read("here").is_ok_and(|c| c.memory.is_none()));
        for wrong in ["h200x", "h100:0", "h100:many", "missing.ron"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_fault_in_a_file_names_its_line() {
        let text = BUILT_IN[1].1.replace("flops: 67.0e12", "flopz: 67.0e12");
        let error = parse(Path::new("x.ron"), &text).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("x.ron:6: ") && error.contains("flopz"), "{error}");
        let text = BUILT_IN[1].1.replace("bandwidth: 450.0e9", "bandwidth: -1.0");
        assert!(parse(Path::new("x.ron"), &text).is_err());
        let text = BUILT_IN[1].1.replace("latency: 12.0e-6", "latency: -1.0");
        assert!(matches!(parse(Path::new("x.ron"), &text), Err(ClusterError::Wait(..))));
    }
}
