"A folder of documents: read, edited, read again, indexed; and what no file may do. The parts are tested in `nbs/06_documents.ipynb`."
import html, json, os, random, re, sys, tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from cmtrag.documents import DocumentError, Documents, front_matter, parse, read_folder, size
from cmtrag.retrieval import HashEncoder, Index, MiniLM, index_for
from cmtrag.sources import Corpus

quiet = lambda it, **kw: it
read  = lambda folder, **kw: read_folder(folder, progress=quiet, **kw)
words = lambda s: re.findall(r'\w+', s)
fuzz  = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

class Counting(HashEncoder):
    "Keeps the texts it is asked to encode."
    def __init__(self): super().__init__(1024); self.seen = []
    def encode_passages(self, ps): self.seen += [x for _,x in ps]; return super().encode_passages(ps)

def sentence(r, n=12): return ' '.join(r.choice('river mayor label film city bridge song harbour teacher garden winter music'.split()) for _ in range(n)).capitalize()+f' {r.randrange(10**6)}.'

def markdown(i):
    r = random.Random(i)
    part = lambda k: f'## Part {k}\n\n'+'\n\n'.join(' '.join(sentence(r) for _ in range(r.randint(1, 9))) for _ in range(r.randint(1, 3)))
    return f'# Document {i}\n\n'+sentence(r)+'\n\n'+'\n\n'.join(part(k) for k in range(r.randint(1, 4)))+'\n'

def folder(root, n=200, old=True):
    for i in range(n):
        p = root/f'{i%7}'/f'doc{i:03d}.md'
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_text(markdown(i), encoding='utf-8')
        if old: os.utime(p, (10**9, 10**9))   # written long ago: size and time can be trusted
    return root

def subsequence(few, many):
    "Do all of `few` occur in `many`, in order? The first that does not, or `None`."
    it = iter(many)
    return next((w for w in few if not any(w==m for m in it)), None)

def shown(f): return [w for p in f for w in words(p.title)+words(p.text)]

# --- two hundred files, one of them edited

def test_one_edit_embeds_only_its_paragraphs(tmp_path):
    home,state = folder(tmp_path/'docs'),tmp_path/'index'
    docs = read(home)
    assert docs.counts['files']==200 and not docs.skipped and len(docs.corpus) > 400
    assert all(subsequence(words(markdown(i)), shown(docs.files[f'{i%7}/doc{i:03d}.md'].passages)) is None for i in range(200))
    enc = Counting()
    first = index_for(docs.corpus, enc, state, quiet)
    assert first.encoded==len(docs.corpus)==len(enc.seen) and not first.taken_over
    docs.save(tmp_path/'docs.json')

    target = home/'3'/'doc003.md'
    target.write_text(target.read_text()+'\n## Addition\n\nThe lighthouse was painted yellow in 1931.\n')
    (home/'0'/'doc000.md').unlink()
    later = read(home, known=Documents.load(tmp_path/'docs.json'))
    assert (later.changed, later.removed, later.added, later.parsed)==(['3/doc003.md'], ['0/doc000.md'], [], ['3/doc003.md'])
    enc.seen.clear()
    second = index_for(later.corpus, enc, state, quiet)
    assert enc.seen==['The lighthouse was painted yellow in 1931.']
    assert (second.encoded, second.taken_over)==(1, len(later.corpus)-1)
    found = second.search('When was the lighthouse painted yellow?', 1)[0][0]
    fresh = Index.build(read(home).corpus, HashEncoder(1024))
    assert second.ids==fresh.ids and np.array_equal(second.vectors, fresh.vectors)
    lines = target.read_text().split('\n')
    assert later.cite(found)==f'3/doc003.md:{lines.index("The lighthouse was painted yellow in 1931.")+1} (Addition)'

def test_a_changed_word_changes_its_passage_only(tmp_path):
    home = folder(tmp_path, 20)
    docs = read(home)
    p = home/'1'/'doc001.md'
    last = p.read_text().rstrip().rsplit(' ', 1)
    p.write_text(last[0]+' changed.\n')
    later = read(home, known=docs)
    new = [x for x in later.corpus if x.id not in docs.corpus]
    assert len(new)==1 and 'changed.' in new[0].text and len([x for x in docs.corpus if x.id not in later.corpus])==1

def test_unchanged_files_are_not_even_read(tmp_path, monkeypatch):
    docs,opened,real = read(folder(tmp_path, 20)),[],Path.read_bytes
    monkeypatch.setattr(Path, 'read_bytes', lambda p: opened.append(p.name) or real(p))
    (tmp_path/'2'/'doc002.md').write_text('# Other')
    later = read(tmp_path, known=docs)
    assert opened==['doc002.md'] and later.changed==['2/doc002.md'] and len(later.unchanged)==19
    opened.clear()
    os.utime(tmp_path/'3'/'doc003.md')   # touched, not changed
    again = read(tmp_path, known=later)
    assert set(opened)=={'doc002.md', 'doc003.md'} and not again.changed and not again.parsed   # the other one is too fresh to be trusted

def test_an_edit_within_one_tick_is_seen(tmp_path):
    p = tmp_path/'a.txt'
    p.write_text('the red boat')
    t,docs = p.stat().st_mtime_ns,read(tmp_path)
    p.write_text('the tan boat')
    os.utime(p, ns=(t, t))
    assert read(tmp_path, known=docs).changed==['a.txt']

def test_another_folder_with_the_same_names(tmp_path):
    docs = read(folder(tmp_path/'a', 10))
    folder(tmp_path/'b', 10)
    p = tmp_path/'b'/'4'/'doc004.md'
    p.write_text(p.read_text().replace('Document', 'Xocument'))
    os.utime(p, (10**9, 10**9))
    assert read(tmp_path/'b', known=docs).changed==['4/doc004.md']

def test_order_does_not_depend_on_creation(tmp_path):
    for d,order in ('a', range(30)), ('b', reversed(range(30))):
        (tmp_path/d).mkdir()
        for i in order: (tmp_path/d/f'{i}.txt').write_text(f'text {i}')
    a,b = read(tmp_path/'a'),read(tmp_path/'b')
    assert list(a.files)==list(b.files) and a.corpus.ids==b.corpus.ids

def test_minilm_incremental_is_fresh(tmp_path):
    enc,home = MiniLM(),folder(tmp_path/'d', 3)
    docs = read(home)
    old = Index.build(docs.corpus, enc, tmp_path/'old', quiet)
    (home/'1'/'doc001.md').write_text(markdown(1)+'\n'+markdown(77))
    later = read(home, known=docs)
    new = [p for p in later.corpus if p.id not in docs.corpus]
    inc = Index.build(later.corpus, enc, tmp_path/'new', quiet, like=tmp_path/'old')
    fresh = Index.build(later.corpus, enc, progress=quiet)
    assert len(docs.corpus)>7 and (inc.encoded, inc.taken_over)==(len(new), len(later.corpus)-len(new)) and 0<len(new)<len(later.corpus)
    assert np.abs(inc.vectors-fresh.vectors).max() < 1e-6 and inc.manifest==fresh.manifest
    assert inc.search('Who was the mayor?', 5)==fresh.search('Who was the mayor?', 5)
    assert old.manifest['truncated']==fresh.manifest['truncated']==0

# --- what cannot be read

def test_what_cannot_be_read_is_said(tmp_path):
    (tmp_path/'good.md').write_text('# Good\nText.')
    (tmp_path/'image.md').write_bytes(b'\x89PNG\r\n\x1a\n'+bytes(99))
    (tmp_path/'nul.txt').write_bytes(b'text\0text')
    (tmp_path/'latin.txt').write_bytes('caf\xe9 au lait'.encode('latin-1'))
    (tmp_path/'empty.html').write_text('<script>x()</script>')
    (tmp_path/'big.txt').write_text('word '*1000)
    (tmp_path/'paper.pdf').write_bytes(b'%PDF-1.7')
    (tmp_path/'.hidden.md').write_text('# No')
    (tmp_path/'wide.txt').write_bytes('Zoë'.encode('utf-16'))
    docs = read(tmp_path, max_bytes=2000)
    assert list(docs.files)==['good.md', 'wide.txt'] and [p.text for p in docs.files['wide.txt'].passages]==['Zoë']
    assert {s.file: s.reason for s in docs.skipped}=={'image.md':'binary', 'nul.txt':'binary', 'latin.txt':'not UTF-8', 'empty.html':'empty', 'big.txt':'too big', 'paper.pdf':'binary', '.hidden.md':'hidden'}
    for part in ('image.md: binary (PNG image)', 'nul.txt: binary (NUL byte at offset 4)', 'latin.txt: not UTF-8 (byte 0xe9 at offset 3', 'convert it to text first', 'skipped 1 hidden'): assert part in docs.summary()
    for f,why in ('image.md', 'binary'), ('nul.txt', 'binary'), ('latin.txt', 'offset 3'), ('big.txt', 'too big'):
        (tmp_path/'one').mkdir(exist_ok=True)
        for p in (tmp_path/'one').iterdir(): p.unlink()
        (tmp_path/'one'/f).write_bytes((tmp_path/f).read_bytes())
        with pytest.raises(DocumentError, match=why): read(tmp_path/'one', strict=True, max_bytes=2000)

def test_folders_that_are_none(tmp_path):
    (tmp_path/'file.md').write_text('x'); (tmp_path/'empty').mkdir(); (tmp_path/'code').mkdir(); (tmp_path/'code'/'a.c').write_text('int')
    for p,why in ('gone', 'no such folder'), ('file.md', 'is a file'), ('empty', 'is empty'), ('code', 'no document that can be read.*a.c: unknown kind'):
        with pytest.raises(DocumentError, match=why): read(tmp_path/p)
    assert issubclass(DocumentError, ValueError)

def test_bad_jsonl_line(tmp_path):
    (tmp_path/'a.jsonl').write_text('{"title": "A", "body": "one"}\n{"title": "B", "body": 7}\n')
    with pytest.raises(DocumentError) as e: read(tmp_path)
    assert (e.value.file, e.value.line, e.value.field)==('a.jsonl', 2, 'body') and 'a.jsonl:2' in str(e.value)
    (tmp_path/'a.jsonl').write_text('\n'.join(json.dumps({'title':'A', k:f'one {k}'}) for k in ('text','contents','body','paragraph_text')))
    assert [p.text for p in read(tmp_path).corpus]==[f'one {k}' for k in ('text','contents','body','paragraph_text')]

@pytest.mark.skipif(sys.platform=='win32', reason='no such names and files')
def test_odd_names_links_and_pipes(tmp_path):
    home = tmp_path/'d'; home.mkdir()
    (home/'new\nline.md').write_text('# A\nx'); (home/'Ünïcödé 日本 .txt').write_text('y'); (home/'-rf.md').write_text('z')
    try: (Path(os.fsdecode(os.fsencode(home)+b'/\xff.txt'))).write_text('bytes')
    except OSError: pass
    os.mkfifo(home/'pipe.md'); (home/'loop').symlink_to(home); (home/'self.md').symlink_to(home/'self.md')
    (tmp_path/'out').mkdir(); (tmp_path/'out'/'o.md').write_text('# Out\nthere'); (tmp_path/'out'/'back').symlink_to(tmp_path/'out'); (home/'out').symlink_to(tmp_path/'out')
    docs = read(home)
    assert {'new\\nline.md', 'Ünïcödé 日本 .txt', '-rf.md', 'out/o.md'} <= set(docs.files)
    assert {s.file: s.reason for s in docs.skipped}=={'pipe.md':'not a file', 'loop':'link', 'self.md':'link', 'out/back':'link'}
    saved = Documents.load(docs.save(tmp_path/'s.json'))
    assert saved.files==docs.files and not read(home, known=saved).parsed

def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    (tmp_path/'a.md').write_text('# A\nx'); (tmp_path/'b.md').write_text('# B\nx')
    real = Path.read_bytes
    def no(p):
        if p.name=='a.md': raise PermissionError(13, 'Permission denied')
        return real(p)
    monkeypatch.setattr(Path, 'read_bytes', no)
    docs = read(tmp_path)
    assert [(s.file, s.reason, s.detail) for s in docs.skipped]==[('a.md', 'unreadable', 'Permission denied')] and list(docs.files)==['b.md']

# --- files that mean well

def test_text_that_begins_like_a_binary_file(tmp_path):
    for n,b in {'riff.md': b'RIFF is a container format.\n', 'id3.txt': b'ID3 tags hold the title of a song.\n', 'gif.md': 'GIF89a was published in 1989 — long ago.\n'.encode(), 'bz.html': b'BZh is how bzip2 begins.', 'mz.txt': b'OggS\n'}.items(): (tmp_path/n).write_bytes(b)
    assert len(read(tmp_path).files)==5
    for n,b in {'riff.md': b'RIFF\x10\0\0\0WAVE', 'id3.txt': b'ID3\x04\0', 'gif.md': b'GIF89a\xff\x01', 'bz.html': b'BZh91AY&SY\xd9', 'mz.txt': b'%PDF-1.4\n1 0 obj'}.items(): (tmp_path/n).write_bytes(b)
    (tmp_path/'good.md').write_text('text')
    assert {s.file: s.reason for s in read(tmp_path).skipped}=={n: 'binary' for n in ('riff.md', 'id3.txt', 'gif.md', 'bz.html', 'mz.txt')}

@pytest.mark.parametrize('tag', ['svg', 'nav', 'script', 'style', 'noscript', 'template', 'nav><nav'])
def test_a_tag_that_is_never_closed_takes_nothing_along(tag):
    page = f'<h1>Start</h1><script>x()</script><style>p {{}}</style><p>Before.</p><{tag}>inside</p>\n<h2>Next</h2><p>After <b>all</b>.</p>'
    ps = parse(page, 'html', 'x.html')
    assert [(p.title, p.text, p.line) for p in ps][-1]==('Start > Next', 'After all.', 2) and ps[0].text.startswith('Before.')
    assert not any(w in p.text for p in ps for w in ('x()', 'p {}', '<'))
    closed = parse(page.replace('inside', 'inside'+''.join(f'</{t}>' for t in tag.split('><'))), 'html', 'x.html')
    assert 'inside' not in str(closed) and closed[-1].text=='After all.'
    assert parse('<p>a</p>'+f'<{tag}>x'*20000+'<h2>end</h2><p>b', 'html', 'x.html')[-1].text=='b'

@pytest.mark.parametrize('s,n', [('---\nNote: the pumps are off.\n---\n', 0), ('---\nNote: one\nmore text\n---\n', 0), ('---\nTitle: x\n---\n', 1), ('---\nfoo: 1\nbar: 2\n---\n', 1), ('---\ntags:\n  - a\n---\n', 1), ('+++\ndraft = true\n+++\n', 1), ('---\nnote: a\n\n---\n', 0)])
def test_a_note_between_rules_is_no_front_matter(s, n):
    assert front_matter(s+'Text.')[1]==n*len(s)
    assert n or 'ote: ' in parse(s+'Text.', 'markdown', 'x.md')[0].text+parse(s+'Text.', 'markdown', 'x.md')[0].title

def test_foreign_json_lines_do_not_stop_a_folder(tmp_path):
    (tmp_path/'good.md').write_text('text')
    (tmp_path/'log.jsonl').write_text('{"level": "info", "msg": "up"}\n{"level": "warn"}\n')
    (tmp_path/'odd.jsonl').write_text('not JSON at all\n[1]\n')
    docs = read(tmp_path)
    assert list(docs.files)==['good.md'] and [(s.file, s.reason) for s in docs.skipped]==[('log.jsonl', 'unknown kind'), ('odd.jsonl', 'unknown kind')] and 'without a text field' in docs.summary()
    with pytest.raises(DocumentError, match='without a text field'): read(tmp_path, strict=True)
    (tmp_path/'log.jsonl').write_text('{"level": "info"}\n{"text": "up"}\n')
    with pytest.raises(DocumentError, match=r'log.jsonl:1: .*Correct the line, or move the file out of the folder'): read(tmp_path)

@pytest.mark.skipif(sys.platform=='win32', reason='there it is the time of creation')
def test_an_edit_with_its_time_set_back_is_seen(tmp_path):
    p = tmp_path/'a.md'
    p.write_text('CBS was founded in 1927.')
    os.utime(p, (10**9, 10**9))
    known = Documents.load(read(tmp_path).save(tmp_path/'.s'))
    p.write_text('CBS was founded in 1928.')
    os.utime(p, (10**9, 10**9))
    assert read(tmp_path, known=known).changed==['a.md']
    d = json.loads((tmp_path/'.s').read_text())
    for f in d['files']: del f['ctime']   # written by an earlier version: compared by content
    (tmp_path/'.s').write_text(json.dumps(d))
    assert read(tmp_path, known=Documents.load(tmp_path/'.s')).changed==['a.md']

# --- lines

@pytest.mark.parametrize('kind,br', [(k, b) for k in ('markdown', 'html') for b in ('<br>', '<br/>\n', '\u2028', '\n', '  \n', '\\\n', ' <br>\n  ')]+[('text', '\u2028'), ('text', '\n')])
def test_every_passage_cites_its_line(kind, br):
    "A break that shows is a line of the file only if the file has one there."
    ss = [f's{i} '+' '.join(f'w{i}x{j}' for j in range(12))+'.' for i in range(40)]
    body = br.join(ss)
    text = dict(markdown=f'# T\n\n{body}\n\nlast\n', html=f'<h1>T</h1>\n<p>{body}</p>\n<p>last</p>\n', text=f'first\n\n{body}\n\nlast\n')[kind]
    ps,lines = parse(text, kind, 'x', 60, 90),text.split('\n')
    assert len(ps) > 5
    for p in ps: assert words(p.text)[0] in words(lines[p.line-1]), p
    pre = parse(f'<pre>{"<br>".join(ss)}</pre>\n<p>last one</p>', 'html', 'x')
    assert {p.line for p in pre[:-1]}=={1} and pre[0].text.count('\n') > 1

# --- lengths

GERMAN = ('Die Wirtschaftsverbände kritisieren regelmäßig die Unternehmensbesteuerung, während Gewerkschaften höhere Sozialversicherungsbeiträge der Arbeitgeber fordern. '
          'Die Verkehrsinfrastruktur umfasst zahlreiche Autobahnen, Wasserstraßen und Schienenwege, die überwiegend vom Bundesministerium verwaltet werden. '
          'Das Bundesverfassungsgericht überwacht die Einhaltung der Grundrechte und entscheidet über Verfassungsbeschwerden. ')
FINNISH = ('Suomen tasavallan perustuslaki säätää kansalaisten perusoikeuksista ja valtiollisten toimielinten tehtävistä. Eduskunnan täysistunnossa käsitellään hallituksen esityksiä, '
           'joista valiokunnat antavat mietintönsä. Ympäristöministeriön alaisuudessa toimivat aluehallintovirastot valvovat vesistöjen kunnostushankkeita ja luonnonsuojelualueiden käyttöä. ')
CODE = 'def read_folder(self, known_documents=None, maxBytes=20_000):\n    return [os.path.join(self.rootFolder, n) for n in sorted(os.listdir(d)) if not n.startswith(".")]\n'

def test_no_passage_is_longer_than_the_encoder_reads():
    import base64
    from hashlib import sha256
    enc = MiniLM()
    blob = base64.b64encode(b''.join(sha256(bytes([i])).digest() for i in range(99))).decode()
    for text,kind in (GERMAN*9, 'markdown'), (FINNISH*9, 'markdown'), (f'```\n{CODE*9}```\n', 'markdown'), ('ประเทศไทยมีเมืองหลวงคือกรุงเทพมหานคร'*60, 'text'), (blob, 'text'), ('word '*3+blob+' end', 'markdown'), ('x'*5000, 'html'):
        ps = parse(text, kind, 'x.md')
        assert len(ps) > 1 and not enc.cut([(p.title, p.text) for p in ps]), text[:20]
        assert ''.join(''.join(p.text.split()) for p in ps)==''.join(text.replace('```', '').split())

def test_a_megabyte_without_a_space_is_cut(tmp_path):
    (tmp_path/'b.txt').write_text('A'*10**6)
    docs = read(tmp_path)
    assert all(size(p.text) <= 220 for p in docs.corpus) and sum(len(p.text) for f in docs.files.values() for p in f.passages)==10**6

# --- whatever bytes, whatever text

@fuzz
@given(st.dictionaries(st.sampled_from(['a.md', 'b.txt', 'c.jsonl', 'd.html', 'e.bin', 'f']), st.binary(max_size=300), max_size=6))
def test_any_bytes(files):
    with tempfile.TemporaryDirectory() as d:
        for n,b in files.items(): (Path(d)/n).write_bytes(b)
        try: docs = read(d)
        except DocumentError: return
        assert len(docs.files)+len(docs.skipped)==len(files) and len(docs.corpus)
        assert Documents.load(docs.save(Path(d)/'.s')).files==docs.files

odd = st.text(st.sampled_from('ab1 \n\t#>-*_`~|[]()<>!&;:=."\'\\/\u2028\xa0日。é\x01\x0c\ufeff')) | st.text(st.characters(blacklist_characters='\0', blacklist_categories=['Cs']))
pieces = st.lists(st.sampled_from(['<p>', '</p>', '<table>', '<tr>', '<td>', '<th>', '</tr>', '<h2>', '</h2>', '<pre>', '<nav>', '</nav>', '<script>', '</script>', '<title>', '<br>', '<![', '<!--', '-->', '<?', '&#xD800;',
                                   '<li>', '<', '&am', '</', 'word', ' two words ', '\n', '---\n', 'title: x\n', '[a]: b', '```\n', '| a | b |\n', '|--|--|\n', '> ', '1. ', '# ']) | odd, max_size=25).map(''.join)

@fuzz
@example('# ', 'markdown')
@given(pieces, st.sampled_from(['markdown', 'html', 'text', 'jsonl']))
def test_any_text_is_read_or_refused(s, kind):
    try: ps = parse(s, kind, 'x.md')
    except DocumentError: return
    for p in ps: assert p.text.strip() and p.line >= 1 and p.title.encode()

@fuzz
@example('a. b\n'*900)
@given(odd)
def test_text_keeps_every_word(s):
    assert [w for p in parse(s, 'text', 'x.txt') for w in words(p.text)]==words(s)

def rendered(s):
    from markdown_it import MarkdownIt
    return MarkdownIt('commonmark', dict(maxNesting=100)).enable(['table','strikethrough']).render(s[front_matter(s)[1]:])

def visible(out):
    "The words that a browser shows of rendered Markdown; tags inside a line separate nothing."
    out = re.sub(r'</?(em|strong|s|code|a)\b[^>]*>', '', re.sub(r'<pre>|</pre>', ' ', out))
    return words(html.unescape(re.sub(r'<[^>]*>', ' ', out)))

@fuzz
@given(st.text(st.sampled_from('ab1 \n#>-*_`~|[]()!:=."\'\\日。é\t'), max_size=200))
@example('# A\n## B\n')
@example('a\n===\n\n# b\n\n> # c\n\n- # d\n')
@example('|a|b|\n|-|-|\n|c|\n\n- x\n\n      code\n')
def test_markdown_keeps_every_visible_word(s):
    out = rendered(s)
    for text,kind in (s, 'markdown'), (out, 'html'):
        missing = subsequence(visible(out), shown(parse(text, kind, 'x')))
        assert missing is None, (kind, missing)

word = st.integers(0, 10**6).map(lambda i: f'w{i}')
para = st.lists(word, min_size=1, max_size=250).map(lambda ws: (' '.join(ws)+'.', ws))
block = (para | para.map(lambda p: (f'- {p[0]}', p[1])) | para.map(lambda p: (f'> {p[0]}', p[1])) | para.map(lambda p: (f'```\n{p[0]}\n```', p[1]))
         | st.lists(word, min_size=1, max_size=60).map(lambda ws: ('| H |\n|--|\n'+'\n'.join(f'| {w} |' for w in ws), ['H', *ws])) | st.tuples(st.integers(1, 6), word).map(lambda t: ('#'*t[0]+' '+t[1], [t[1]])))

@settings(fuzz, max_examples=60)
@given(st.lists(block, max_size=8))
@example([('w1.', ['w1']), ('# w0', ['w0'])])
@example([('## w0', ['w0']), ('## w0', ['w0']), ('w1.', ['w1'])])
@example([('# w0', ['w0']), ('# w0', ['w0']), ('w1.', ['w1'])])
def test_documents_are_cut_to_size(blocks):
    ps = parse('\n\n'.join(b for b,_ in blocks), 'markdown', 'x.md')
    assert subsequence([w for _,ws in blocks for w in ws], shown(ps)) is None
    for p in ps: assert size(p.title)+size(p.text) <= 225, size(p.text)

@pytest.mark.parametrize('unit', ['word\n', 'A sentence of words. ', 'x, ', '.', ' ', '日本。', 'a\n\n'])
def test_large_files_are_read_in_seconds(unit):
    "Nothing of ours grows with the square of a file."
    import time
    text = unit*(3*10**5//len(unit))
    t = time.process_time()
    ps = parse(text, 'text', 'x.txt')
    assert time.process_time()-t < 10
    assert sum(len(''.join(p.text.split())) for p in ps)==len(''.join(text.split()))
