"""The verbs, each with its line in the list of commands."""

from __future__ import annotations

VERBS = {
    "run": "Run a program in a fresh box.",
    "box": "Make, use, pause, fork and remove boxes that stay.",
    "host": "Check what boxes need of this host, and fix what is missing.",
    "doctor": "Test every promise of a box on this host.",
    "init": "Write a ringfence.yaml, optionally from an MCP client's file.",
    "wrap": "Run any stdio MCP server in a box, as a drop-in command.",
    "serve": "Serve the gateway that a ringfence.yaml describes.",
    "check": "Check a ringfence.yaml and report every problem.",
    "policy": "Test the rules of policy by cases, and on the calls on record.",
    "can": "Tell what would happen to a call and why, without making it.",
    "call": "Call one tool, through a running gateway or in this process.",
    "top": "Show calls, questions, sessions and servers as they change.",
    "undo": "Take back what calls did, the last first.",
    "console": "Print a link that logs you in to the console.",
    "approvals": "List the calls that wait for an approval, and answer them.",
    "token": "Create, list and revoke bearer tokens of agents and people.",
    "audit": "Read, explain, verify and export the audit log.",
    "image": "Build root file systems for boxes out of this host.",
    "state": "Show and prune what Ringfence keeps on this machine.",
    "bench": "Measure what calls and boxes cost on this machine.",
    "completion": "Print a shell completion script.",
}
