"""The two themes: ink and paper, one mint accent, and six colours that always mean the same bytes.

The ledger's entries keep their colour on every screen (weights blue, KV cache green, compute
amber, overhead violet, margin grey, free hollow), and each also has a letter and a fill of its own
for NO_COLOR and for eyes that do not tell them apart.
"""

from __future__ import annotations

from typing import Final

from textual.theme import Theme

DARK: Final = Theme(
    name="edgellm-dark",
    primary="#5FD7B7",
    secondary="#7AA2F7",
    accent="#F2A65A",
    foreground="#D5DBE6",
    background="#0F1218",
    surface="#151A22",
    panel="#1D232E",
    success="#86D993",
    warning="#EFC368",
    error="#F27A7A",
    dark=True,
    variables={
        "border": "#2C3544",
        "border-blurred": "#262E3B",
        "faint": "#768297",
        "muted": "#8D98AB",
        "ledger-weights": "#6C9CF5",
        "ledger-kv": "#4FC9A4",
        "ledger-state": "#9ACB5B",
        "ledger-compute": "#EDAA55",
        "ledger-overhead": "#B18CF0",
        "ledger-margin": "#4A5568",
        "ledger-free": "#222A36",
        "ledger-taken": "#343D4B",
        "on-ledger": "#0B0E13",
        "code-background": "#11151C",
        "input-cursor-background": "#5FD7B7",
        "input-selection-background": "#5FD7B7 30%",
        "block-cursor-background": "#24403D",
        "block-cursor-foreground": "#EAFBF5",
        "block-cursor-text-style": "bold",
        "block-cursor-blurred-background": "#1D2A2C",
        "footer-background": "#0F1218",
        "footer-key-foreground": "#5FD7B7",
        "footer-description-foreground": "#8D98AB",
        "footer-item-background": "#0F1218",
        "scrollbar": "#2C3544",
        "scrollbar-hover": "#3B4658",
        "scrollbar-active": "#5FD7B7",
        "scrollbar-background": "#0F1218",
        "scrollbar-background-hover": "#0F1218",
        "scrollbar-background-active": "#0F1218",
        "scrollbar-corner-color": "#0F1218",
    },
)

LIGHT: Final = Theme(
    name="edgellm-light",
    primary="#0B7A63",
    secondary="#2F5FC4",
    accent="#A8540A",
    foreground="#262B33",
    background="#FAF8F3",
    surface="#F3F0E9",
    panel="#E9E5DB",
    success="#2C7A3D",
    warning="#8F6300",
    error="#B42F3A",
    dark=False,
    variables={
        "border": "#CFC9BB",
        "border-blurred": "#DAD5C9",
        "faint": "#78715F",
        "muted": "#6B665A",
        "ledger-weights": "#5B8AE8",
        "ledger-kv": "#3DAE8B",
        "ledger-state": "#7FAE3F",
        "ledger-compute": "#E09A3E",
        "ledger-overhead": "#9C75DD",
        "ledger-margin": "#BDB6A6",
        "ledger-free": "#E6E1D5",
        "ledger-taken": "#D3CCBC",
        "on-ledger": "#10131A",
        "code-background": "#F1EDE3",
        "input-cursor-background": "#0B7A63",
        "input-selection-background": "#0B7A63 25%",
        "block-cursor-background": "#CFE8DF",
        "block-cursor-foreground": "#10302A",
        "block-cursor-text-style": "bold",
        "block-cursor-blurred-background": "#E3EBE2",
        "footer-background": "#FAF8F3",
        "footer-key-foreground": "#0B7A63",
        "footer-description-foreground": "#6B665A",
        "footer-item-background": "#FAF8F3",
        "scrollbar": "#CFC9BB",
        "scrollbar-hover": "#B7B09F",
        "scrollbar-active": "#0B7A63",
        "scrollbar-background": "#FAF8F3",
        "scrollbar-background-hover": "#FAF8F3",
        "scrollbar-background-active": "#FAF8F3",
        "scrollbar-corner-color": "#FAF8F3",
    },
)

THEMES: Final = (DARK, LIGHT)

ENTRIES: Final[tuple[tuple[str, str, str, str, str], ...]] = (
    # the ledger's field ("taken": by other programs), its name, letter, fill and colour
    ("taken", "in use", "U", "╳", "ledger-taken"),
    ("weights", "weights", "W", "█", "ledger-weights"),
    ("repacked", "repacked", "R", "▛", "ledger-weights"),
    ("extra", "draft, projector", "X", "▙", "ledger-state"),
    ("kv_cache", "KV cache", "K", "▓", "ledger-kv"),
    ("recurrent_state", "state", "S", "▚", "ledger-state"),
    ("compute", "compute", "C", "▒", "ledger-compute"),
    ("output", "output", "P", "▞", "ledger-compute"),
    ("process", "process", "E", "▗", "ledger-overhead"),
    ("overhead", "overhead", "O", "░", "ledger-overhead"),
    ("margin", "margin", "M", "╱", "ledger-margin"),
    ("free", "free", "F", "·", "ledger-free"),
)
