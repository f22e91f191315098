"""The two pages a browser gets. They load nothing from anywhere else."""

from __future__ import annotations

from typing import Final

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;
color:#1c2128;background:#fff}
@media(prefers-color-scheme:dark){body{color:#d8dee6;background:#14181d}code,pre{background:#222a33}}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}code,pre{background:#eef1f4;border-radius:4px;
padding:.1em .3em;font:13px/1.45 ui-monospace,monospace}pre{padding:.7em;overflow:auto}
details{border-bottom:1px solid #8884;padding:.35rem 0}summary{cursor:pointer}
.m{display:inline-block;min-width:4.2em;font-weight:600}td,th{text-align:left;
padding:.2em 1em .2em 0}
"""

HOME: Final = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>edgellm</title><style>{_STYLE}</style>
<h1>edgellm</h1>
<p>OpenAI's API is at <code>/v1</code>, Anthropic's at <code>/v1/messages</code>.
<a href="/docs">All endpoints</a> · <a href="/health">health</a> ·
<a href="/metrics">metrics</a></p>
<h2>Models</h2><table id="models"></table>
<script>
fetch("/v1/models").then(r=>r.json()).then(d=>{{
 const t=document.getElementById("models");
 for(const m of d.data||[]){{const row=t.insertRow();
  for(const v of [m.id,m.status.value,m.meta?m.meta.n_ctx+" tokens":""])
   row.insertCell().textContent=v;}}
}});
</script>
</html>
""".encode()

DOCS: Final = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>edgellm: endpoints</title><style>{_STYLE}</style>
<h1>Endpoints</h1><p>From <a href="/openapi.json">/openapi.json</a>.</p><div id="all"></div>
<script>
const show=(s,all,depth)=>{{
 if(!s) return "";
 if(s.$ref&&depth<3) return show(all[s.$ref.split("/").pop()],all,depth+1);
 return s;
}};
fetch("/openapi.json").then(r=>r.json()).then(d=>{{
 const root=document.getElementById("all"), groups={{}};
 for(const [path,ops] of Object.entries(d.paths)) for(const [method,op] of Object.entries(ops))
  (groups[op.tags[0]]=groups[op.tags[0]]||[]).push([method,path,op]);
 for(const [tag,list] of Object.entries(groups)){{
  const h=document.createElement("h2"); h.textContent=tag; root.append(h);
  for(const [method,path,op] of list){{
   const e=document.createElement("details"), s=document.createElement("summary");
   const m=document.createElement("span"); m.className="m"; m.textContent=method.toUpperCase();
   const c=document.createElement("code"); c.textContent=path;
   s.append(m,c," "+op.summary); e.append(s);
   const b=op.requestBody&&op.requestBody.content["application/json"].schema;
   if(b){{const p=document.createElement("pre");
    p.textContent=JSON.stringify(show(b,d.components.schemas,0),null,1); e.append(p);}}
   root.append(e);
  }}
 }}
}});
</script>
</html>
""".encode()
