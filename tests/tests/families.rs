//! The families beside GPT-2 and llama, whole, in lockstep and f64: the training step equals the oracle, on every mesh
//! one device, and the gradient bodies what their primitives come to. And what their configs may say, and may not.

use std::collections::{BTreeMap, BTreeSet};

use ir::state::{AdamW, View};
use ir::{Graph, Mesh, Name, Node, Op};
use meshc_tests::meaning::{equals_one_device, step, taps};
use meshc_tests::oracle::{Oracle, read, tensors};
use models::{Config, Shape};
use runtime::eval::eval;
use runtime::lockstep::{Feeds, one_device};
use runtime::tensor::Tensor;
use serde_json::{Value, json};

const CASES: [&str; 5] = ["llama_rope", "mistral", "qwen2", "qwen3", "gemma2"];

type FileTensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// What a view shows of a file tensor.
fn window(view: &View, file: &(Vec<usize>, Vec<f64>)) -> Vec<f64> {
    assert_eq!(view.shape, file.0, "{}", view.file);
    let start = vec![view.offset];
    let places = view.dims.iter().fold(start, |places, (n, stride)| {
        places.iter().flat_map(|p| (0..*n).map(move |i| p + i * stride)).collect()
    });
    places.iter().map(|p| file.1[*p]).collect()
}

fn feeds(weights: &FileTensors, data: &FileTensors, graph: &Graph, step: usize) -> Feeds<f64> {
    let mut feeds: Feeds<f64> = BTreeMap::new();
    for state in &graph.states {
        let shape = state.shape();
        let value = match state.views.first() {
            Some(view) => Tensor { shape, data: window(view, &weights[&*view.file]) },
            None => Tensor::full(&shape, 0.0),
        };
        feeds.insert(state.name.clone(), value);
    }
    for input in &graph.inputs {
        let shape: Vec<usize> = input.dims.iter().map(|(_, n)| *n).collect();
        let rows = data["inputs"].0[1] * shape[1];
        let n: usize = shape.iter().product();
        let value = match &*input.name {
            "position" => Tensor::from_fn(&shape, |i| (i % shape[1]) as f64),
            name => Tensor { data: data[name].1[step * rows..step * rows + n].to_vec(), shape },
        };
        feeds.insert(input.name.clone(), value);
    }
    feeds
}

fn files(oracle: &Oracle) -> (FileTensors, FileTensors) {
    (tensors(&oracle.folder.join("model.safetensors")), tensors(&oracle.folder.join("data.safetensors")))
}

fn config(oracle: &Oracle) -> Config {
    Config::read(&oracle.folder).unwrap()
}

/// The training step of a config, with so many rows.
fn trained(config: &Config, adamw: AdamW, batch: usize) -> Graph {
    let mut graph = models::build(config, Shape { batch, sequence: 32 }).unwrap();
    graph.optimizer = Some(adamw);
    graph.dump = true;
    graph
}

fn on_one_device(graph: Graph) -> Graph {
    step(graph, &Mesh::parse("").unwrap(), BTreeMap::new()).graph
}

/// The tapped values.
fn tapped(graph: &Graph, feeds: &Feeds<f64>) -> BTreeMap<Name, Tensor<f64>> {
    let values = one_device(graph, feeds);
    taps(graph).into_iter().map(|(name, v)| (name, values[v.index()].clone())).collect()
}

#[test]
fn one_device_equals_the_oracle() {
    for name in CASES {
        let oracle = read(name);
        let (weights, data) = files(&oracle);
        let batch = oracle.case["global_batch"].as_u64().unwrap() as usize;
        let graph = on_one_device(trained(&config(&oracle), oracle.adamw(), batch));
        let taps = taps(&graph);
        let mut states = feeds(&weights, &data, &graph, 0);
        states.retain(|name, _| graph.state(name).is_some());
        let mut compared = 0;
        for step in 0..3 {
            let mut now = feeds(&weights, &data, &graph, step);
            now.extend(states.clone());
            let values = one_device(&graph, &now);
            for (tap, key) in [("loss", "loss_per_step"), ("grad_norm", "grad_norm_per_step")] {
                let (got, want) = (values[taps[tap].index()].data[0], oracle.numbers(key)[step]);
                assert!((got - want).abs() < 1e-6 * want, "{name} step {step} {tap}: {got} {want}");
            }
            for (tap, value) in taps.iter().filter(|_| step == 0) {
                let Some((_, want)) = oracle.expected.get(&**tap) else { continue };
                let got = &values[value.index()].data;
                let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(worst < 1e-6, "{name} {tap}: off by {worst:e}");
                compared += 1;
            }
            for node in &graph.nodes {
                if let Op::Assign(name) = &node.op {
                    states.insert(name.clone(), values[node.args[0].index()].clone());
                }
            }
        }
        let gradients = oracle.expected.keys().filter(|k| k.starts_with("grad.")).count();
        assert_eq!(compared, gradients + 1, "{name}: the logits and a gradient of each file tensor");
    }
}

#[test]
fn every_mesh_equals_one_device() {
    for name in CASES {
        let oracle = read(name);
        let (weights, data) = files(&oracle);
        for mesh in ["dp=2,tp=2", "tp=3", "tp=5,dp=2"] {
            let mesh = Mesh::parse(mesh).unwrap();
            let graph = trained(&config(&oracle), oracle.adamw(), 3);
            let places = planner::conventions::places(&graph, &mesh);
            let sharded = step(graph, &mesh, places);
            let feeds = feeds(&weights, &data, &sharded.graph, 0);
            equals_one_device(&sharded, &feeds, eval).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

#[test]
fn gradient_bodies_are_the_gradients_of_their_primitives() {
    for name in CASES {
        let oracle = read(name);
        let (weights, data) = files(&oracle);
        let with = trained(&config(&oracle), oracle.adamw(), 2);
        let mut without = with.clone();
        without.nodes.iter_mut().for_each(|n| n.tag = None);
        let [got, want] = [with, without].map(|graph| {
            let graph = on_one_device(graph);
            tapped(&graph, &feeds(&weights, &data, &graph, 0))
        });
        assert_eq!(got.len(), want.len());
        for (tap, value) in &got {
            let off = value.distance(&want[tap]);
            assert!(off < 1e-12, "{name}: {tap} is off by {off:e}");
        }
    }
}

/// The file tensors of a llama as a Phi 3 has them.
fn fused(llama: &FileTensors) -> FileTensors {
    let mut out = llama.clone();
    let parts =
        [("qkv_proj", &["q_proj", "k_proj", "v_proj"][..]), ("gate_up_proj", &["gate_proj", "up_proj"])];
    for (whole, parts) in parts {
        for name in llama.keys().filter(|k| k.contains(parts[0])) {
            let taken = parts.iter().filter_map(|p| out.remove(&name.replace(parts[0], p)));
            let (mut shape, mut data) = (vec![0, 0], Vec::new());
            for (part_shape, part) in taken {
                shape = vec![shape[0] + part_shape[0], part_shape[1]];
                data.extend(part);
            }
            out.insert(name.replace(parts[0], whole), (shape, data));
        }
    }
    out
}

#[test]
fn phi3_is_a_llama_with_fused_tensors() {
    let oracle = read("llama");
    let (weights, data) = files(&oracle);
    let llama = config(&oracle);
    let phi3 = with(&llama, json!({ "model_type": "phi3", "sliding_window": null, "mlp_bias": null }));
    let steps = [(llama, weights.clone()), (phi3, fused(&weights))].map(|(config, weights)| {
        let graph = on_one_device(trained(&config, oracle.adamw(), 2));
        let feeds = feeds(&weights, &data, &graph, 0);
        (tapped(&graph, &feeds), graph)
    });
    let [(want, _), (got, graph)] = steps;
    assert_eq!(got.len(), want.len());
    for (tap, value) in &got {
        let unfused = ["q", "k", "v", "gate", "up"].iter().fold(tap.to_string(), |name, part| {
            let whole = if part.len() == 1 { "qkv" } else { "gate_up" };
            name.replace(&format!("{whole}_proj.{part}."), &format!("{part}_proj."))
        });
        let off = value.distance(&want[&*unfused]);
        assert!(off < 1e-12, "{tap} is off by {off:e}");
    }
    let files: Vec<&str> = graph.states.iter().flat_map(|s| &s.views).map(|v| &*v.file).collect();
    assert_eq!(files.iter().filter(|f| f.ends_with("layers.0.self_attn.qkv_proj.weight")).count(), 3);
    assert_eq!(files.iter().filter(|f| f.ends_with("layers.0.mlp.gate_up_proj.weight")).count(), 2);
}

#[test]
fn an_untied_gpt2_has_a_head_of_its_own() {
    let oracle = read("gpt2");
    let (mut weights, data) = files(&oracle);
    weights.insert("lm_head.weight".to_string(), weights["transformer.wte.weight"].clone());
    let tied = config(&oracle);
    let untied = with(&tied, json!({ "tie_word_embeddings": false }));
    let [tied, untied] = [tied, untied].map(|config| {
        let graph = on_one_device(trained(&config, oracle.adamw(), 2));
        tapped(&graph, &feeds(&weights, &data, &graph, 0))
    });
    assert!(untied["logits"].distance(&tied["logits"]) < 1e-12);
    // Each use of a tied table gives it a part of its gradient.
    let (head, table) = (&untied["grad.lm_head.weight"], &untied["grad.transformer.wte.weight"]);
    let mut sum = head.clone();
    sum.data.iter_mut().zip(&table.data).for_each(|(a, b)| *a += b);
    assert!(sum.distance(&tied["grad.transformer.wte.weight"]) < 1e-12);
}

/// A config with other keys; null takes one away, `"null"` makes one null.
fn with(config: &Config, keys: Value) -> Config {
    let mut config = config.clone();
    for (key, value) in keys.as_object().unwrap() {
        let given = if value == "null" { Value::Null } else { value.clone() };
        config.keys.insert(key.clone(), given);
        if value.is_null() {
            config.keys.remove(key);
        }
    }
    config
}

fn built(config: &Config) -> Result<String, String> {
    let graph = models::build(config, Shape { batch: 2, sequence: 32 });
    graph.map(|g| g.to_string()).map_err(|e| e.to_string())
}

#[test]
fn keys_of_both_generations_say_the_same() {
    let base = |name: &str| config(&read(name));
    let scaling = json!({ "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32 });
    let rope = json!({ "rope_type": "default", "rope_theta": 10_000.0 });
    let old = json!({ "rope_parameters": null, "rope_theta": 10_000.0, "rope_scaling": "null" });
    let same = [
        ("llama_rope", json!({ "rope_parameters": null, "rope_theta": 500_000.0, "rope_scaling": scaling })),
        ("mistral", json!({ "rope_parameters": null })),
        ("mistral", old.clone()),
        ("qwen2", old),
        ("qwen2", json!({ "layer_types": null, "sliding_window": 4096 })),
        ("qwen2", json!({ "layer_types": null, "use_sliding_window": true, "sliding_window": 8 })),
        ("gemma2", json!({ "layer_types": null })),
        ("gemma2", json!({ "attn_logit_softcapping": null, "final_logit_softcapping": null })),
        ("gemma2", json!({ "rope_parameters": { "sliding_attention": rope, "full_attention": rope } })),
        (
            "gemma2",
            json!({ "tie_word_embeddings": null, "hidden_activation": null, "cache_implementation": "hybrid" }),
        ),
    ];
    for (name, keys) in same {
        let config = base(name);
        let other = with(&config, keys.clone());
        assert!(built(&config).unwrap() == built(&other).unwrap(), "{name} with {keys}");
    }
    let other = [
        ("mistral", json!({ "sliding_window": "null" })),
        ("mistral", json!({ "sliding_window": null })),
        (
            "qwen2",
            json!({ "layer_types": null, "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1 }),
        ),
        ("qwen3", json!({ "head_dim": 8 })),
        ("gemma2", json!({ "layer_types": ["full_attention", "sliding_attention"] })),
        ("gemma2", json!({ "attn_logit_softcapping": "null" })),
        ("gemma2", json!({ "final_logit_softcapping": "null" })),
        ("gemma2", json!({ "query_pre_attn_scalar": 9 })),
        (
            "gemma2",
            json!({ "rope_parameters": { "full_attention": rope, "sliding_attention": { "rope_theta": 5.0 } } }),
        ),
    ];
    for (name, keys) in other {
        let config = base(name);
        let other = with(&config, keys.clone());
        assert!(built(&config).unwrap() != built(&other).unwrap(), "{name} with {keys}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let scaling = |key: &str, value: Value| {
        let mut all = json!({ "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32 });
        all[key] = value;
        json!({ "rope_parameters": null, "rope_scaling": all })
    };
    let rope = |value: Value| json!({ "rope_parameters": value });
    let phi3 = json!({ "model_type": "phi3", "mlp_bias": null });
    let longrope =
        json!({ "rope_parameters": null, "rope_scaling": { "type": "longrope", "long_factor": [1.0] } });
    let rows = [
        ("llama", rope(json!({ "rope_type": "yarn" })), "`rope_parameters.rope_type` is \"yarn\""),
        (
            "llama",
            rope(json!({ "rope_theta": -1.0 })),
            "`rope_parameters.rope_theta` is -1.0, but needs to be a number above 0",
        ),
        (
            "llama",
            rope(json!({ "partial_rotary_factor": 0.5 })),
            "`rope_parameters.partial_rotary_factor` is 0.5",
        ),
        ("llama", rope(json!({ "mrope_section": [1] })), "`rope_parameters.mrope_section` is [1]"),
        ("llama", rope(json!("llama3")), "`rope_parameters` is \"llama3\", but needs to be an object"),
        ("llama", rope(json!({ "sliding_attention": {} })), "lacks `rope_parameters.full_attention`"),
        (
            "llama",
            json!({ "rope_scaling": { "factor": 2 } }),
            "`rope_scaling` is {\"factor\":2}, but needs to be absent",
        ),
        (
            "llama",
            json!({ "rope_parameters": null, "rope_scaling": { "type": "linear" } }),
            "`rope_scaling.type` is \"linear\"",
        ),
        ("llama", scaling("factor", Value::Null), "`rope_scaling.factor` is null, but needs to be a number"),
        ("llama", scaling("high_freq_factor", json!(0.5)), "needs to be above low_freq_factor, 1"),
        ("llama", scaling("beta_fast", json!(32)), "`rope_scaling.beta_fast` is 32"),
        ("llama", json!({ "sliding_window": 8 }), "`sliding_window` is 8; a llama with that"),
        ("llama", json!({ "num_key_value_heads": 3 }), "needs to be a divisor of num_attention_heads, 4"),
        (
            "llama",
            json!({ "num_attention_heads": 12, "head_dim": null, "num_key_value_heads": 2 }),
            "needs to be a divisor of hidden_size, 32",
        ),
        ("llama", json!({ "head_dim": 7 }), "`head_dim` is 7, but needs to be an even number"),
        (
            "llama",
            json!({ "attention_dropout": 1.0 }),
            "`attention_dropout` is 1.0, but needs to be a number from 0",
        ),
        ("mistral", json!({ "sliding_window": 0 }), "`sliding_window` is 0"),
        ("mistral", json!({ "attention_bias": true }), "`attention_bias` is true; a mistral with that"),
        ("qwen2", json!({ "layer_types": ["full_attention"] }), "needs to be a list of 2 strings"),
        (
            "qwen2",
            json!({ "layer_types": ["full_attention", "linear_attention"] }),
            "`layer_types[1]` is \"linear_attention\"",
        ),
        (
            "qwen2",
            json!({ "layer_types": ["sliding_attention", "full_attention"] }),
            "lacks `sliding_window`",
        ),
        (
            "qwen2",
            json!({ "max_window_layers": -1 }),
            "`max_window_layers` is -1, but needs to be a whole number",
        ),
        ("qwen3", json!({ "qk_layernorm": true }), "`qk_layernorm` is true; a qwen3 with that"),
        ("gemma2", json!({ "use_bidirectional_attention": true }), "`use_bidirectional_attention` is true"),
        (
            "gemma2",
            json!({ "final_logit_softcapping": -3 }),
            "`final_logit_softcapping` is -3, but needs to be a number above 0, or null",
        ),
        (
            "gemma2",
            json!({ "query_pre_attn_scalar": "null" }),
            "`query_pre_attn_scalar` is null, but needs to be a number above 0",
        ),
        ("gemma2", json!({ "hidden_activation": "gelu" }), "`hidden_activation` is `gelu`"),
        (
            "llama",
            json!({ "model_type": "llama5" }),
            "supported are gpt2, llama, mistral, qwen2, qwen3, gemma2, phi3",
        ),
    ];
    for (name, keys, wanted) in rows {
        let error = built(&with(&config(&read(name)), keys.clone())).err().unwrap_or_default();
        assert!(error.contains(wanted), "{name} with {keys}: `{error}`, not `{wanted}`");
    }
    let phi3 = with(&config(&read("llama")), phi3);
    assert!(built(&phi3).is_ok());
    let rows = [
        (longrope, "`rope_scaling.type` is \"longrope\"; a phi3 with that"),
        (json!({ "partial_rotary_factor": 0.75 }), "`partial_rotary_factor` is 0.75"),
        (
            json!({ "resid_pdrop": "0.1" }),
            "`resid_pdrop` is \"0.1\", but needs to be a number from 0 to below 1",
        ),
    ];
    for (keys, wanted) in rows {
        let error = built(&with(&phi3, keys)).err().unwrap_or_default();
        assert!(error.contains(wanted), "`{error}`, not `{wanted}`");
    }
}

/// Where Transformers drops something, and under which name.
#[test]
fn every_place_of_dropout_draws_by_its_own_name() {
    let rates = json!({ "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attention_dropout": 0.1 });
    let of_phi3 =
        with(&with(&config(&read("llama")), json!({ "model_type": "phi3", "mlp_bias": null })), rates);
    let of_gpt2 = json!({ "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1 });
    let of_gpt2 = with(&config(&read("gpt2")), of_gpt2);
    let of_llama = with(&config(&read("llama")), json!({ "attention_dropout": 0.1 }));
    let rows: [(Config, Option<&str>, &[&str]); 3] = [
        (of_gpt2, Some("transformer.drop"), &["attn.attn_dropout", "attn.resid_dropout", "mlp.dropout"]),
        (of_phi3, None, &["self_attn.attention_dropout", "resid_attn_dropout", "resid_mlp_dropout"]),
        (of_llama, None, &["self_attn.attention_dropout"]),
    ];
    for (config, once, each) in rows {
        let graph = models::build(&config, Shape { batch: 2, sequence: 8 }).unwrap();
        let name = |n: &Node| if let Op::Random(draw) = &n.op { Some(draw.name.to_string()) } else { None };
        let names: Vec<String> = graph.nodes.iter().filter_map(name).collect();
        let distinct: BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
        let layers = graph.layers as usize;
        assert_eq!(names.len(), each.len() * layers + usize::from(once.is_some()), "{names:?}");
        assert!(once.is_none_or(|once| names.iter().any(|n| n == once)), "{names:?}");
        for place in each {
            assert_eq!(names.iter().filter(|n| n.ends_with(place)).count(), layers, "{place}: {names:?}");
        }
    }
}
