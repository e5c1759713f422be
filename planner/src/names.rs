//! What a person calls a value: the parameter that it is, whose gradient it is, or what made it where.

use ir::{Graph, Op, Part, Value};

/// A name for a value of a sharded graph.
pub fn name(graph: &Graph, makers: &[usize], value: Value) -> String {
    let Some(node) = makers.get(value.index()).and_then(|i| graph.nodes.get(*i)) else {
        return value.to_string();
    };
    if let Op::State(name) | Op::Input(name) = &node.op {
        return name.to_string();
    }
    if matches!(node.op, Op::Reshard | Op::Accumulate) {
        return name(graph, makers, node.args[0]);
    }
    if let Some(like) = node.like
        && node.mark.part != Part::Forward
    {
        let of = name(graph, makers, like);
        return if of.starts_with("gradient of ") { of } else { format!("gradient of {of}") };
    }
    // A product is called by its parameter, if it has one: by that a person knows it.
    let parameter = node.args.iter().filter(|_| node.is_product()).find_map(|v| {
        let maker = graph.nodes.get(*makers.get(v.index())?)?;
        if let Op::State(name) = &maker.op { Some(name.clone()) } else { None }
    });
    if let (Some(parameter), Part::Forward) = (parameter, node.mark.part) {
        return format!("{parameter} product");
    }
    let what = match &node.tag {
        Some(tag) if &*tag.role == "inner" => tag.composite.to_string(),
        Some(tag) => format!("{} {}", tag.composite, tag.role),
        None => node.op.to_string(),
    };
    if node.mark.part == Part::Update && node.signature.results.first().is_some_and(Vec::is_empty) {
        return scalar(graph, makers, value).unwrap_or(what);
    }
    // A sum of a parameter's gradient and a scalar keeps that gradient's name.
    if node.mark.part == Part::Update
        && let Some(of) =
            node.args.iter().map(|v| name(graph, makers, *v)).find(|n| n.starts_with("gradient of "))
    {
        return of;
    }
    match (graph.layers, node.mark.layer) {
        (0, layer) => format!("layer {layer} {what}"),
        (layers, mark) if (1..=layers).contains(&mark) => format!("layer {} {what}", mark - 1),
        (_, 0) => format!("embedding {what}"),
        (_, _) => format!("head {what}"),
    }
}

/// The tap that a scalar of the update leads to.
fn scalar(graph: &Graph, makers: &[usize], value: Value) -> Option<String> {
    let mut reached = vec![false; graph.values.len()];
    reached[value.index()] = true;
    let behind = &graph.nodes[makers[value.index()]..];
    for node in behind.iter().filter(|n| n.args.iter().any(|v| reached[v.index()])).collect::<Vec<_>>() {
        if let Op::Tap(name) = &node.op
            && reached[node.args[0].index()]
        {
            return Some(name.to_string());
        }
        node.results.iter().for_each(|v| reached[v.index()] = true);
    }
    None
}
