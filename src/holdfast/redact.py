"""Removal of passwords and tokens from error texts.

Connection strings reach people in errors, often malformed, because a character in the password was not
encoded. So this does not parse: where it is unclear what belongs to the password, more is hidden, not less.

Error texts quote what producers send, so every expression here takes time in proportion to the text: an attempt that
may fail far from its start begins at most once in each word or line, or is bounded.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

from holdfast.short_texts import remembering_short

HIDDEN = "***"
LIMIT = 16_384
_LONGEST_WORD = 8_192

_SECRET_NAMES = frozenset({"password", "passwd", "pwd", "sslpassword", "pgpassword"})

# ?password=… and &sslpassword=…; an & that starts no new name=value still belongs to the value.
_QUERY = re.compile(r"(?P<start>[?&])(?P<name>[^=&?\s]+)=(?P<value>[^&\s]*(?:&(?![^=&\s]+=)[^&\s]*)*)")

# password=…, password = '…', "password": "…": the keyword form, the environment, keyword arguments, JSON.
# A quote that is never closed hides everything after it.
_KEYWORD = re.compile(
    r"""
    (?<![?&\w]) (?P<name> (?:pg|ssl)?password | passwd | pwd )
    (?P<equals> \s*=>?\s* | ["']\s*(?:=>|[:=])\s* )
    (?: '(?:[^'\\]|\\.)*(?:'(?:\\.|\S)*|\\?\Z) | "(?:[^"\\]|\\.)*(?:"(?:\\.|\S)*|\\?\Z) | (?:\\.|\S)+ )
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)

# scheme://user:…@ up to the last @ of the line, because a password may hold an @ (or / # ? and spaces). The expression
# is for the text before that @.
_USERINFO = re.compile(r"(?<=[A-Za-z0-9+.-]):/{1,3}[^:\s]*:")

# No @ at all: host:port is fine, anything else after the colon may be a password.
_NO_HOST = re.compile(
    r"(?P<start>(?<=[A-Za-z0-9+.-])://[^:/?#@\s\[\]]*):(?!\*\*\*@|\d{1,5}(?:[/?,\s'\");.]|$)|\s|$)[^\n]*",
    re.MULTILINE,
)

# user:…@host, the scheme forgotten or mistyped. Only behind a scheme that is known may :// be followed by a user. The
# second expression is for the text before the last @ of a word.
_BEFORE_AT = re.compile(r"(?<!\S)\S+@")
_BARE = re.compile(
    r"""
      (?<![\w:]) (?:postgres(?:ql)?|https?|amqps?|nats|rediss?|valkeys?|kafka|tls|wss?)(?:\+\w+)?://
    | (?<=[\w.%+/-]) (?P<colon> : ) (?=.)
    """,
    re.VERBOSE | re.IGNORECASE,
)


# Authorization: Bearer …, 'X-Api-Key': '…', also as a header's name and value in a tuple.
_HEADER = re.compile(
    r"""
    (?P<start>
      (?: \b(?:proxy-)?authorization | \b(?:set-)?cookie | (?<![\w-])x-[\w-]*(?:key|token|secret|signature|auth) )
      ["']?\s*+[:=,]\s*+
    ) (?!\*\*\*)
    (?: "(?:[^"\\\n]|\\.)*+\\?"? | '(?:[^'\\\n]|\\.)*+\\?'? | [^\n"'}\])]+ )
    """,
    re.VERBOSE | re.IGNORECASE,
)

# api_key=…, client_secret=…, "token": "…", credentials=('…', '…'); the name may be the end of a longer one.
_NAMED = re.compile(
    r"""
    (?P<start> (?<![\w-])[\w-]*?
      (?: (?:api|access|account|encryption|master|private|secret|shared|signing)[_-]?key | secret | token
        | passw(?:or)?d | passphrase | credentials? | signature | session[_-]?id | csrf
        | (?<![\w-])(?:key|sig|auth|pass|pwd?|jwt|otp|pin) )
      (?: [ \t]{0,3}=>[ \t]{0,3} | = | ["']\s*(?:=>|[:=])\s* ) )
    (?: "(?:[^"\\\n]|\\.)*+\\?"? | '(?:[^'\\\n]|\\.)*+\\?'? | [\w.]{0,80}\((?:[^()\n]|\([^()\n]*\))*+\)? | \[[^\]\n]*\]?
    | [^\s"'&,;)}\]]+ )
    """,
    re.VERBOSE | re.IGNORECASE,
)

# password: …, client_secret: …, api-key: …, as people and YAML write them; but not what an error says about a field of
# that name, such as "password: Field required".
_LABELLED = re.compile(
    r"""
    (?P<start> (?<![\w-])[\w-]*?
      (?: (?:api|access|private|secret)[_-]?key | [\w-](?:secret|token) | passw(?:or)?d | passphrase | (?<![\w-])pwd? )
      :[ \t]*+ )
    (?! (?: an? | any | be | can(?:not)? | does | empty | expected | expired | field | for | has | in | input | invalid
        | is | length | may | missing | must | no | none | not | null | of | only | optional | required | should | the
        | this | too | unknown | value | was | were | will | wrong | str(?:ing)? | int | bytes
        | \w+(?:error|exception) )\b )
    (?: "(?:[^"\\\n]|\\.)*+\\?"? | '(?:[^'\\\n]|\\.)*+\\?'? | [^\s"'&,;)}\]]+ )
    """,
    re.VERBOSE | re.IGNORECASE,
)

# PASSWORD '…' and IDENTIFIED BY '…' of SQL, --password … of a command, and "the password is …" of a sentence; but not
# what an error says about a password.
_SPOKEN = re.compile(
    r"""
    (?P<start>
        (?<![\w-])(?:passw(?:or)?d|passphrase) [ \t]++ (?=["'])
      | \bidentified [ \t]++ by [ \t]++ (?:(?:password|values)[ \t]++)? (?=["'])
      | (?<![\w-])--[\w-]*?(?:(?:api|access|private|secret)-?key|secret|token|passw(?:or)?d|passphrase) [ \t]++ (?!-)
      | (?<![\w-])(?:passw(?:or)?d|passphrase) [ \t]++ is [ \t]++
        (?! (?: an? | already | also | being | blank | compromised | correct | empty | encrypted | expired | for | in
            | incorrect | invalid | longer | missing | never | no | none | not | now | null | of | only | optional
            | required | sent | set | shorter | stored | the | too | unknown | unset | used | weak | wrong )\b ) )
    (?!\*\*\*)
    (?: "[^"\n]*"? | '(?:[^'\n]|'')*+'? | [^\s"'&,;)}\]]+ )
    """,
    re.VERBOSE | re.IGNORECASE,
)

# Tokens that are recognised without a name.
_TOKEN = re.compile(
    r"""
      (?P<start> \b(?i:(?:Bearer|Basic|Token|Digest)\s+ | (?:token|secret|signature|credentials?):[ ]*+) )
      (?=[A-Za-z._~+/-]*[0-9=]) [\w.~+/=-]{6,}
    # Of letters only; but not what an error says about authentication.
    | (?P<bearer> \bBearer\s++ ) (?! (?i:auth|challenge|credential|format|header|protocol|scheme|security|token) )
      [\w.~+/=-]{12,}
    | (?P<basic> \bBasic\s++ ) (?=[\w+/]{0,200}[a-z][A-Z]) [\w+/]{8,}
    | (?P<before> (?<![\w-])(?>[\w-]*?(?=\beyJ)) ) [\w-]{8,}+\.[\w-]+(?:\.[\w-]*)?
    | \b(?:sk|pk|rk|whsec)_[A-Za-z0-9_]{8,} | \bgh[pousr]_\w{16,} | \bgithub_pat_\w{16,} | \bxox[a-z]-[\w-]{8,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{12,}+\b | \bglpat-[\w-]{16,}
    """,
    re.VERBOSE,
)

# A private key, which may stand where other expressions expect one word.
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:(?!-----END)[\s\S])*(?:-----END[^\n-]*-----)?")

# What Postgres, its drivers and pydantic quote of rows, parameters and input.
_QUOTED = re.compile(
    r"""
      ^(?P<label> [ \t]*(?:DETAIL|CONTEXT|QUERY|STATEMENT|LINE\ \d+):[ ]* ) [^\n]+
    | (?P<key> \)=\( ) [^\n]*
    | (?P<row> \bFailing\ row\ contains\ \( ) [^\n]*
    | (?P<sql> \[(?:SQL|parameters):\  ) [^\n]*
    | (?P<argument> \bfor\ query\ argument\ \$\d+[^\n:]{0,80}:\  ) [^\n]*
    | (?P<input> \binput_value= ) (?:(?!,\ input_type=)[^\n])*
    """,
    re.VERBOSE | re.MULTILINE,
)

# Each pattern keeps at most one group of its match. It can match only texts that contain one of its words, in upper or
# lower case.
_SECRETS = (
    (
        _QUOTED,
        ("detail", "context", "query", "statement", "line ", ")=(", "failing row", "[", " argument ", "input_"),
    ),
    (_HEADER, ("authorization", "cookie", "x-")),
    (_NAMED, ("=", "'", '"')),
    (_SPOKEN, ("passw", "passphrase", "identified", "--")),
    (_LABELLED, ("passw", "passphrase", "pw", "key:", "secret:", "token:")),
    (
        _TOKEN,
        (
            "bearer",
            "basic",
            "token",
            "digest",
            "secret:",
            "signature:",
            "credential",
            "eyj",
            "k_",
            "whsec_",
            "gh",
            "xox",
            "akia",
            "asia",
            "glpat",
        ),
    ),
)


def unredacted(text: str) -> str:
    """Return the text unchanged: as a redactor, it turns the redaction of error texts off."""
    return text


@remembering_short
def redact_secrets(text: str) -> str:
    """Return `text` without passwords, tokens, and what databases and pydantic quote of rows and input."""
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = redact_dsn(text)
    lower = text.lower()
    for pattern, words in _SECRETS:
        # Looking for a word costs a hundredth of what the pattern costs, and most texts have none.
        if any(word in lower for word in words):
            text = pattern.sub(_hide, text)
    return text


def _hide(match: re.Match[str]) -> str:
    return f"{match[match.lastgroup] if match.lastgroup else ''}{HIDDEN}"


def redact_dsn(text: str) -> str:
    """Return `text` with the passwords of connection strings replaced by `***`, cut after 16 KiB."""
    if len(text) <= LIMIT:
        return _without_passwords(text)
    # The last word may be half a DSN.
    head = text[:LIMIT]
    space = head.rfind(" ")
    if LIMIT - space <= _LONGEST_WORD:
        return f"{_without_passwords(head[:space])} …[truncated]"
    # The last word is longer than any DSN: whole DSNs in it are hidden, and half a DSN can only be at its end. The text
    # before the word stays, even if little is left of it.
    kept = max(_without_passwords(head)[:-_LONGEST_WORD], _without_passwords(head[: max(space, 0)]), key=len)
    return f"{kept} …[truncated]"


def _without_passwords(text: str) -> str:
    text = _QUERY.sub(_hide_value, text)
    if "=" in text or '"' in text or "'" in text:
        text = _KEYWORD.sub(rf"\g<name>\g<equals>{HIDDEN}", text)
    if ":/" in text:
        text = "\n".join(map(_without_userinfo, text.split("\n")))
        text = _NO_HOST.sub(rf"\g<start>:{HIDDEN}", text)
    return _BEFORE_AT.sub(_hide_bare, text) if "@" in text else text


def _hide_value(match: re.Match[str]) -> str:
    # Names may be percent-encoded too.
    if unquote_plus(match["name"]).casefold() not in _SECRET_NAMES:
        return match[0]
    return f"{match['start']}{match['name']}={HIDDEN}"


def _without_userinfo(line: str) -> str:
    at = line.rfind("@")
    found = _USERINFO.search(line, 0, max(at, 0))
    return f"{line[: found.end()]}{HIDDEN}{line[at:]}" if found else line


def _hide_bare(match: re.Match[str]) -> str:
    before = match[0][:-1]
    colon = next((found.end() for found in _BARE.finditer(before) if found["colon"]), None)
    return f"{before[:colon]}{HIDDEN}@" if colon else match[0]
