"""The links of an HTML page, in time proportional to its size, whatever it contains."""

import contextlib
import html
import re
from typing import Final

# Possessive, so that no page is read twice.
_TAG: Final = re.compile(r'<(/?)([a-zA-Z][^\s/>]*+)')
_ATTRIBUTE: Final = re.compile(
    r"""[\s/]*+(?:(>)|([^\s/>][^\s/>=]*+)\s*+(?:=\s*+(?:"([^"]*+)"|'([^']*+)'|(["'])|([^\s>]*+)))?+)"""
)
# Elements that contain text and no tags, with the beginning of their end.
_TEXTS: Final = {name: re.compile(f'</{name}', re.IGNORECASE) for name in ('script', 'style', 'textarea', 'title')}


def links_of(page: str) -> list[str]:
    """Return the targets of the links of a page, in order, without those in comments and scripts.

    As in a browser, a page may be malformed; a tag or comment that does not end is left out, as is a target that cannot
    be decoded.
    """
    targets: list[str] = []
    at = 0
    while (at := page.find('<', at)) >= 0:
        if (tag := _TAG.match(page, at)) is None:
            if page.startswith(('<!', '<?', '</'), at):
                comment = page.startswith('<!--', at)
                end = page.find('-->' if comment else '>', at + 2)  # also of <!-->
                at = end + 1 if end >= 0 else len(page)
            else:
                at += 1
            continue
        name, at, href = tag[2].lower(), tag.end(), None
        while (attribute := _ATTRIBUTE.match(page, at)) is not None and not attribute[5]:
            at = attribute.end()
            if attribute[1]:
                break
            if attribute[2].lower() == 'href' and href is None:
                href = attribute[3] or attribute[4] or attribute[6]
        else:  # the page, or a value in quotes, ends before the tag does
            break
        if name == 'a' and href and not tag[1]:
            with contextlib.suppress(ValueError):  # the number of a character, of thousands of digits
                targets.append(html.unescape(href))
        if name in _TEXTS and not tag[1]:
            end_tag = _TEXTS[name].search(page, at)
            at = end_tag.start() if end_tag else len(page)
    return targets
