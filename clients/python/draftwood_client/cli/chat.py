"""`draftwood chat`: one answer, or a conversation at the terminal or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Annotated

import typer

from draftwood.v1.generation_pb2 import GetModelInfoResponse as ModelInfo
from draftwood_client.cli.answering import AsJson, ShowDrafts, Stats, read_tools, require_tools, write_answer
from draftwood_client.cli.options import ConnectionOptions, GenerationFlags, command, or_content, print_error
from draftwood_client.cli.output import AnswerWriter, decode, print_stats, read_text
from draftwood_client.client import Client
from draftwood_client.errors import ArgumentValueError, DraftwoodError
from draftwood_client.messages import ChatMessage
from draftwood_client.options import GenerateOptions

HELP = "/reset clears the conversation, /exit or Ctrl-D exits, Ctrl-C stops an answer."


@command
def chat(
    connection: ConnectionOptions,
    flags: GenerationFlags,
    question: Annotated[
        str | None, typer.Argument(help="A question to answer; '-' reads it from stdin. Without one, a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message before the conversation.")] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            "--tools",
            help="Functions that the model may call: a JSON list as in OpenAI's API; @FILE reads it. Each call is"
            " printed as a line of JSON.",
        ),
    ] = None,
    show_drafts: ShowDrafts = False,
    stats: Stats = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question, or have a conversation. Answers are streamed to stdout.

    In a conversation, /reset clears it, /exit or Ctrl-D exits. Ctrl-C stops an answer; the part that was written stays
    in the conversation. From a pipe, each line is a question, and the first error ends the program.
    """
    opening = [] if system is None else [ChatMessage("system", system)]
    if question is None:
        for flag, given in (("--samples", flags.n), ("--tools", tools), ("--json", as_json or None)):
            if given is not None:
                raise ArgumentValueError(flag, 'needs a question: draftwood chat "..."')
        with connection.client() as client:
            _hold(Conversation(client, flags.options(), opening, show_drafts, stats), client.model_info())
        return
    asked = read_text(question, "QUESTION")
    if not asked.strip():
        raise ArgumentValueError("QUESTION", "is empty")
    messages = [*opening, ChatMessage("user", asked)]
    functions = None if tools is None else read_tools(or_content("--tools", tools))
    with connection.client() as client:
        if functions is not None:
            require_tools(client)
        write_answer(
            client.stream_chat, messages, flags, tools=functions, show_drafts=show_drafts, stats=stats, as_json=as_json
        )


class Conversation:
    """The messages so far. Sends questions and keeps the answers."""

    def __init__(
        self,
        client: Client,
        options: GenerateOptions,
        opening: Sequence[ChatMessage],
        show_drafts: bool,
        stats: bool,
    ) -> None:
        self._client = client
        self._options = options
        self._opening = opening
        self._show_drafts = show_drafts
        self._stats = stats
        self._messages: list[ChatMessage] = []

    def reset(self) -> None:
        self._messages = []

    def ask(self, question: str) -> None:
        """Streams the answer to stdout. A question without any answer is dropped from the conversation.

        Raises:
            KeyboardInterrupt: Ctrl-C; the request is cancelled.
            DraftwoodError: the request failed.
        """
        messages = [*self._messages, ChatMessage("user", question)]
        writer = AnswerWriter(self._show_drafts)
        answer, thoughts = list[str](), list[str]()
        details = {"token_details": True, "raw_text": True} if writer.needs_details else {}
        options: GenerateOptions = {**self._options, **details}  # type: ignore[typeddict-item]
        try:
            with self._client.stream_chat([*self._opening, *messages], **options) as stream:
                for delta in stream:
                    answer.append(delta.text)
                    thoughts.append(delta.reasoning)
                    writer.write(delta)
                completion = stream.completion()
            writer.new_line()
            if self._stats:
                print_stats(completion)
        except BaseException:
            writer.end_line()
            raise
        finally:
            if text := "".join(answer):
                self._messages = [*messages, ChatMessage("assistant", text, reasoning="".join(thoughts))]


def _hold(conversation: Conversation, model: ModelInfo) -> None:
    if not model.has_chat_template:
        raise ArgumentValueError("chat", f"{model.model} has no chat template; try `draftwood complete`")
    if sys.stdin.isatty() and sys.stdout.isatty():
        _converse(conversation, model)
    else:
        _answer_lines(conversation)


def _converse(conversation: Conversation, model: ModelInfo) -> None:
    typer.echo(f"{model.model}. {HELP}", err=True)
    for line in _typed_lines():
        if line == "/reset":
            conversation.reset()
        elif line == "/help":
            typer.echo(HELP, err=True)
        elif line.startswith("/"):
            typer.echo(f"error: {line.split()[0]} is not a command. {HELP}", err=True)
        else:
            try:
                conversation.ask(line)
            except KeyboardInterrupt:
                typer.echo("stopped", err=True)
            except DraftwoodError as error:
                print_error(error)


def _answer_lines(conversation: Conversation) -> None:
    for data in sys.stdin.buffer:
        line = decode(data, "stdin").strip()
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            conversation.ask(line)


def _typed_lines() -> Iterator[str]:
    """Lines that are not blank, until /exit or Ctrl-D. Ctrl-C discards the line being typed."""
    if find_spec("readline"):
        import readline  # noqa: F401  # line editing and history for input()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        if line == "/exit":
            return
        if line:
            yield line
