"""What the Trace Event Format demands of a file, as far as this program writes it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: "JSON Object Format", "Complete
Events", "Metadata Events".
"""

NUMBER = (int, float)
COMPLETE = {"name": str, "cat": str, "ph": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict}
METADATA = {"name": str, "ph": str, "pid": int, "tid": int, "args": dict}
NAMES = {"process_name": ("name", str), "process_sort_index": ("sort_index", int),
         "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


def problems_of_event(event):
    fields = {"X": COMPLETE, "M": METADATA}.get(event.get("ph"))
    if fields is None:
        return [f"phase {event.get('ph')!r}"]
    found = [f"no field {name}" for name in fields.keys() - event.keys()]
    found += [f"a field {name} that the format does not have" for name in event.keys() - fields.keys()]
    for name in fields.keys() & event.keys():
        if not isinstance(event[name], fields[name]) or isinstance(event[name], bool):
            found.append(f"{name} is {event[name]!r}")
    if found:
        return found
    if event["ph"] == "X":
        return [f"{name} is {event[name]}" for name in ("ts", "dur") if event[name] < 0]
    key, kind = NAMES.get(event["name"], ("", object))
    if list(event["args"]) != [key] or not isinstance(event["args"][key], kind):
        return [f"{event['name']} with {event['args']}"]
    return []


def overlaps(events):
    """Complete events of a thread nest, or follow each other."""
    found = []
    threads = {}
    for event in events:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread, spans in threads.items():
        around = []
        for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= span["ts"]:
                around.pop()
            if around and span["ts"] + span["dur"] > around[-1]["ts"] + around[-1]["dur"]:
                found.append(f"{span} overlaps {around[-1]} on {thread}")
            around.append(span)
    return found


def problems(trace):
    """What is wrong with a trace; an empty list if nothing is."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with traceEvents"]
    found = [f"{name} in the trace" for name in trace.keys() - {"traceEvents", "displayTimeUnit", "otherData"}]
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    for event in trace["traceEvents"]:
        found += [f"{problem}: {event}" for problem in problems_of_event(event)]
    if found:
        return found
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [(event["name"], event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "M"]
    if len(names) != len(set(names)):
        found.append("a name is given twice")
    for pid, tid in {(event["pid"], event["tid"]) for event in complete}:
        if ("thread_name", pid, tid) not in names or ("process_name", pid, 0) not in names:
            found.append(f"thread {tid} of process {pid} has no name")
    return found + overlaps(complete)
