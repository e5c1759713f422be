//! Rows that wait for each other, as a graph: an edge to each row that has yet to do what another waits for. As everything
//! that is waited for is in some row's list, a row that stands still waits for one that does, and there is a circle.

use petgraph::algo::{astar, tarjan_scc};
use petgraph::graph::{DiGraph, NodeIndex};

use super::Transport;
use super::events::{Events, What};
use super::fault::{Fault, Stuck};

/// The shortest circle.
pub(super) fn shortest(events: &Events, reached: &[usize], transport: Transport) -> Fault {
    let graph = waits(events, reached);
    let circle = circle(&graph);
    let stuck = |i: usize| {
        let (row, next) = (circle[i], circle[(i + 1) % circle.len()]);
        let event = events.rows[row].get(reached[row])?;
        Some(Stuck {
            place: events.place(row, event.call),
            what: events.waits_for(event.what),
            next: events.program.mesh.in_row(0, next),
            later: call_of(events, event.what, next),
        })
    };
    let still = (0..reached.len()).filter(|r| reached[*r] < events.rows[*r].len()).count();
    Fault::Circle { transport, waits: (0..circle.len()).filter_map(stuck).collect(), still }
}

/// For each row that stands still the rows that it waits for.
fn waits(events: &Events, reached: &[usize]) -> DiGraph<usize, ()> {
    let mut graph = DiGraph::new();
    let nodes: Vec<NodeIndex> = (0..reached.len()).map(|row| graph.add_node(row)).collect();
    for (row, at) in reached.iter().enumerate() {
        let Some(event) = events.rows[row].get(*at) else { continue };
        let mut wait = |other: usize| {
            graph.update_edge(nodes[row], nodes[other], ());
        };
        match event.what {
            What::Sent { channel, number } => {
                events.channels[channel].receives.get(number).into_iter().for_each(|e| wait(e.row));
            }
            What::Received { channel, number } => {
                events.channels[channel].sends.get(number).into_iter().for_each(|e| wait(e.row));
            }
            What::Wait { communicator, number } => {
                let start = What::Start { communicator, number };
                let missing = |r: &usize| events.rows[*r][reached[*r]..].iter().any(|e| e.what == start);
                (0..reached.len()).filter(missing).for_each(wait);
            }
            What::Send { .. } | What::Receive { .. } | What::Start { .. } => {}
        }
    }
    graph
}

/// The rows of a shortest circle, each before the one that it waits for.
fn circle(graph: &DiGraph<usize, ()>) -> Vec<usize> {
    let mut part = vec![0; graph.node_count()];
    for (i, nodes) in tarjan_scc(graph).iter().enumerate() {
        nodes.iter().for_each(|n| part[n.index()] = i);
    }
    let mut best: Vec<NodeIndex> = Vec::new();
    for edge in graph.edge_indices() {
        let Some((from, to)) = graph.edge_endpoints(edge).filter(|(a, b)| part[a.index()] == part[b.index()])
        else {
            continue;
        };
        // From where the edge leads back to where it begins.
        let path = astar(graph, to, |n| n == from, |_| 1usize, |_| 0).map(|(_, path)| path);
        if let Some(path) = path.filter(|p| best.is_empty() || p.len() < best.len()) {
            best = path;
        }
        if best.len() == 1 {
            break;
        }
    }
    let mut rows: Vec<usize> = best.into_iter().map(|n| graph[n]).collect();
    // It begins with its first row.
    if let Some(first) = rows.iter().enumerate().min_by_key(|(_, row)| **row).map(|(i, _)| i) {
        rows.rotate_left(first);
    }
    rows
}

/// The call of another row that would end a wait.
fn call_of(events: &Events, what: What, row: usize) -> usize {
    match what {
        What::Sent { channel, number } => events.channels[channel].receives.get(number).map_or(0, |e| e.call),
        What::Received { channel, number } => {
            events.channels[channel].sends.get(number).map_or(0, |e| e.call)
        }
        What::Wait { communicator, number } => events.joins_in(communicator, number, row),
        What::Send { .. } | What::Receive { .. } | What::Start { .. } => 0,
    }
}
