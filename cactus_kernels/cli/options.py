"""Options that several commands take."""

from typing import Annotated

import typer

ModelOption = Annotated[
    str | None, typer.Option(help="Target: a directory or hub id. Needs --draft.", show_default="the embedded pair")
]
DraftOption = Annotated[str | None, typer.Option(help="Draft, a smaller model with the same tokenizer. Needs --model.")]
DtypeOption = Annotated[
    str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), float32, bfloat16 or float16.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda if there")]
