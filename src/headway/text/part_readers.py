"""What models write when they call tools or think, read into parts: one small state machine per family.

A reader takes text in pieces and holds back what may still become a mark, so that what it gives does not depend on
where the text was cut. What is not a call after all is said, as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from headway.text.call_json import CallObject, RawArguments
from headway.text.parts import CallArguments, CallBegun, Part, PartParser, Said, Thought


class Reader:
    """The loop all readers share. A state takes from `self._text` and returns whether it could go on."""

    thinking = False

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._saying
        self._blanks = ""  # said only if something is said after them: not between a text and a call
        self._called = False

    def push(self, text: str) -> Sequence[Part]:
        self._text += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> Sequence[Part]:
        self._ended = True
        while self._state():
            pass
        self._say(self._text)
        self._text = ""
        if not self._called:
            self._say_blanks()
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _saying(self) -> bool:
        """Whatever comes is text."""
        self._say(self._text)
        self._text = ""
        return False

    def _said_until(self, mark: str, then: Callable[[], bool]) -> bool:
        """What comes before `mark` is text; behind it, `then` reads on."""
        before, found = self._until(mark)
        self._say(before)
        if found:
            self._state = then
        return bool(found)

    def _say(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._say_blanks()
            self._parts.append(Said(kept))
        self._blanks += text[len(kept) :]

    def _say_blanks(self) -> None:
        if self._blanks:
            self._parts.append(Said(self._blanks))
            self._blanks = ""

    def _add(self, parts: Sequence[Part]) -> None:
        """Parts of a call, or what turned out to be none."""
        for part in parts:
            if isinstance(part, Said):
                self._say(part.text)
            else:
                if isinstance(part, CallBegun):
                    self._called, self._blanks = True, ""
                self._parts.append(part)

    def _until(self, *marks: str) -> tuple[str, str]:
        """Take the text up to the first of `marks`, and that -> (the text, the mark; "" if there is none yet). The
        beginning of a mark at the end is left."""
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            before, self._text = self._text[:at], self._text[at + len(mark) :]
            return before, mark
        keep = 0 if self._ended else max(_overlap(self._text, mark) for mark in marks)
        cut = len(self._text) - keep
        before, self._text = self._text[:cut], self._text[cut:]
        return before, ""

    def _skip(self, blanks: str = " \n\t\r") -> bool:
        """Drop blanks -> whether something else follows."""
        self._text = self._text.lstrip(blanks)
        return bool(self._text)

    def _feed(self, value: CallObject | RawArguments, then: Callable[[], bool]) -> bool:
        """Read a call to its end, and go on with `then`."""
        if not self._text:
            if self._ended:
                self._add(value.flush())
                self._state = self._saying
            return False
        parts, self._text = value.push(self._text)
        self._add(parts)
        if value.done:
            self._state = then
        return value.done or self._ended


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


class HermesReader(Reader):
    """Hermes, Qwen 2.5 and 3, and many more: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, each."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def _saying(self) -> bool:
        return self._said_until(self.BEGIN, self._opening)

    def _opening(self) -> bool:
        if not self._skip():
            return False
        if self._text[0] != "{":
            self._say(self.BEGIN)
            self._state = self._saying
        else:
            call = CallObject()
            self._state = lambda: self._feed(call, self._closing)
        return True

    def _closing(self) -> bool:
        _, mark = self._until(self.END)
        if mark:
            self._state = self._saying
        return bool(mark)


class BareJsonReader(Reader):
    """Llama 3: the whole answer is {"name": ..., "parameters": {...}}, or several of them with ";" between.

    Args:
        tools: names of those there are; an object that names none of them is said.
    """

    BEGIN = "<|python_tag|>"

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._tools = tools
        self._state = self._opening

    def _opening(self) -> bool:
        self._text = self._text.lstrip(" \n\t\r;" if self._called else " \n\t\r")
        if self._text.startswith(self.BEGIN):
            self._text = self._text[len(self.BEGIN) :]
        elif self._text.startswith("{"):
            call = CallObject(self._tools)
            self._state = lambda: self._feed(call, self._after)
        elif self._text and (self._ended or not self.BEGIN.startswith(self._text)):
            self._state = self._saying
        else:
            return False
        return True

    def _after(self) -> bool:
        self._state = self._opening if self._called else self._saying
        return True


class MistralReader(Reader):
    """Mistral: [TOOL_CALLS] and a list of {"name", "arguments", "id"}; or, later, [TOOL_CALLS]name[ARGS]{...}, each."""

    BEGIN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

    def _saying(self) -> bool:
        return self._said_until(self.BEGIN, self._opening)

    def _opening(self) -> bool:
        if not self._skip():
            return False
        self._name = ""
        self._state = self._listing if self._text[0] in "[{" else self._naming
        return True

    def _listing(self) -> bool:
        """Between the objects of a list."""
        self._text = self._text.lstrip(" \n\t\r[,")
        if not self._text:
            return False
        if self._text[0] == "{":
            call = CallObject()
            self._state = lambda: self._feed(call, self._listing)
        else:
            self._text = self._text.removeprefix("]")
            self._state = self._saying
        return True

    def _naming(self) -> bool:
        before, mark = self._until(self.ARGS, self.ID, "{")
        self._name += before
        if mark == self.ID:
            self._id, self._state = "", self._identifying
        elif mark:
            self._text = mark * (mark == "{") + self._text
            call = RawArguments(self._name.strip())
            self._state = lambda: self._feed(call, self._saying)
        return bool(mark)

    def _identifying(self) -> bool:
        before, mark = self._until(self.ARGS)
        self._id += before
        if mark:
            call = RawArguments(self._name.strip(), self._id.strip())
            self._state = lambda: self._feed(call, self._saying)
        return bool(mark)


class DeepSeekReader(Reader):
    """DeepSeek V3 and R1 (function<sep>name, arguments in a block of JSON) and V3.1 (name<sep>arguments)."""

    BEGIN, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    CALL_END, END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

    def _saying(self) -> bool:
        return self._said_until(self.BEGIN, self._between)

    def _between(self) -> bool:
        _, mark = self._until(self.CALL, self.END)
        if mark:
            self._name = ""
            self._state = self._saying if mark == self.END else self._typing
        return bool(mark)

    def _typing(self) -> bool:
        before, mark = self._until(self.SEP)
        self._name += before
        if mark and self._name.strip() == "function":
            self._name, self._state = "", self._naming
        elif mark:
            self._arguments()
        return bool(mark)

    def _naming(self) -> bool:
        before, mark = self._until("\n")
        self._name += before
        if mark:
            self._arguments()
        return bool(mark)

    def _arguments(self) -> None:
        call = RawArguments(self._name.strip())
        self._state = lambda: self._feed(call, self._between)


class HarmonyReader(Reader):
    """gpt-oss: messages on channels. What is analysed is thought, what is final is said, what goes to functions.NAME
    is a call of it."""

    CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
    ENDS = ("<|end|>", "<|call|>", "<|return|>")

    def __init__(self) -> None:
        super().__init__()
        self._state = self._heading
        self._head = ""
        self._give: Callable[[str], Part | None] = Said

    def _heading(self) -> bool:
        """Between two messages, up to the text of the next."""
        before, mark = self._until(self.MESSAGE)
        self._head += before
        if mark:
            self._give = self._receiver(self._head)
            self.thinking = self._give is Thought
            self._head, self._state = "", self._telling
        elif self._ended:  # it wrote no header
            self._say(self._head)
            self._head = ""
        return bool(mark)

    def _receiver(self, head: str) -> Callable[[str], Part | None]:
        channel = head.rpartition(self.CHANNEL)[2].split()
        name = head.partition("to=functions.")[2].split("<")[0].split()
        if name:
            self._add([CallBegun(name[0])])
            return CallArguments
        return Thought if channel[:1] == ["analysis"] else Said

    def _telling(self) -> bool:
        before, mark = self._until(*self.ENDS, self.START)
        if before and self._give is Said:
            self._say_blanks()
            self._parts.append(Said(before))
        elif before:
            self._parts.append(self._give(before))  # type: ignore[arg-type]
        if mark:
            self.thinking, self._state = False, self._heading
        return bool(mark)

    def _saying(self) -> bool:
        return False


class ThinkingReader:
    """<think>...</think>, and then what another reader makes of the rest.

    Args:
        rest: reads what is not thought; None = it is said.
        begun: the prompt has opened the reasoning already.
        marks: what opens and closes it.
    """

    def __init__(
        self, rest: PartParser | None, begun: bool = False, marks: tuple[str, str] = ("<think>", "</think>")
    ) -> None:
        self._rest = rest or Plain()
        self._open, self._close = marks
        self._text = ""
        self._blanks = ""
        self._state = "thinking" if begun else "undecided"
        self._fresh = True

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> Sequence[Part]:
        self._text += text
        return self._read(False)

    def flush(self) -> Sequence[Part]:
        return [*self._read(True), *self._rest.flush()]

    def _read(self, ended: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "undecided":
            start = self._text.lstrip()
            if start.startswith(self._open):
                self._state, self._text = "thinking", start[len(self._open) :]
            elif ended or not self._open.startswith(start):
                self._state = "speaking"
        if self._state == "thinking":
            self._think(parts, ended)
        if self._state == "after":
            self._text = self._text.lstrip("\n")
            if self._text:
                self._state = "speaking"
        if self._state == "speaking" and self._text:
            text, self._text = self._text, ""
            parts += self._rest.push(text)
        return parts

    def _think(self, parts: list[Part], ended: bool) -> None:
        at = self._text.find(self._close)
        closed = at >= 0
        cut = at if closed else len(self._text) - (0 if ended else _overlap(self._text, self._close))
        thought = self._blanks + self._text[:cut]
        self._text = self._text[cut + len(self._close) * closed :]
        if self._fresh:
            thought = thought.lstrip("\n")
        kept = thought.rstrip()
        self._blanks = "" if closed else thought[len(kept) :]
        if kept:
            self._fresh = False
            parts.append(Thought(kept))
        if closed:
            self._state = "after"


class Plain:
    """All of it is said."""

    thinking = False

    def push(self, text: str) -> Sequence[Part]:
        return (Said(text),) if text else ()

    def flush(self) -> Sequence[Part]:
        return ()
