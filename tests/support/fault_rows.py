"""The ways in which P/D routers are known to fail their engines, by number."""

ROWS = {
    1: "a client's or an engine's malformed handle ends or hangs an engine",
    2: "streamed answers carry no handle, so bidirectional does nothing",
    3: "a handle is used for a prompt that it does not fit",
    4: "KV is stranded on P when the client leaves between P and D",
    5: "a client that leaves during prefill does not stop it",
    6: "P's lease ends before D reads",
    7: "push: nothing renews P's lease while D has no room",
    8: "push: the legs are sent one after the other",
    9: "push: legs are paired wrongly because an id is used twice",
    10: "push: P fails and D waits for ever",
    11: "push: a retry meets what the first attempt left behind",
    12: "the handle has the shape of another connector",
    13: "n > 1 and lists of prompts share one handle",
    14: "ordinary parameters break the one-token leg",
    15: "logprobs of the prompt",
    16: "P's failure is hidden as a slow success",
    17: "restarts, drains, and errors inside a 200",
    18: "targets from clients, and handles across sessions",
    19: "fields and headers are dropped",
    20: "data-parallel ranks do not match",
}
